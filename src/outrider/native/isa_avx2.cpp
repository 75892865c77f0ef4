#include "vec_avx2.h"

#include "kernels.h"

extern const Kernels kernels_avx2;
constexpr Kernels kernels_avx2 = make_kernels("avx2");
