#include "vec_avx512.h"

#include "kernels.h"

extern const Kernels kernels_amx;
constexpr Kernels kernels_amx = make_kernels("amx");
