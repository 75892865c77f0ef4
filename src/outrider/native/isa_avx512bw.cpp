#include "vec_avx512.h"

#include "kernels.h"

extern const Kernels kernels_avx512bw;
constexpr Kernels kernels_avx512bw = make_kernels("avx512bw");
