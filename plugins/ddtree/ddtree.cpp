#include "plugins/ddtree/ddtree.hpp"
