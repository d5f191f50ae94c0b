// DDTree: best-first draft trees from per-depth marginals, and the lossless walk.
// Ringel & Romano, arXiv 2604.12989.
#pragma once

namespace trtree::ddtree {}
