// Wider vectors where the CPU has them, for loops that the compiler vectorizes by itself.
// Nothing is contracted or reassociated, so every clone gives the same bits.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TRTREE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TRTREE_CLONES
#endif
