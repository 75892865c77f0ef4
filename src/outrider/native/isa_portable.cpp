#include "vec_portable.h"

#include "kernels.h"

extern const Kernels kernels_portable;
constexpr Kernels kernels_portable = make_kernels("portable");
