#include "vec_neon.h"

#include "kernels.h"

extern const Kernels kernels_i8mm;
constexpr Kernels kernels_i8mm = make_kernels("i8mm");
