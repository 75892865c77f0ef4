#include "vec_avx512.h"

#include "kernels.h"

extern const Kernels kernels_avx512;
constexpr Kernels kernels_avx512 = make_kernels("avx512");
