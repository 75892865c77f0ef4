#include "vec_neon.h"

#include "kernels.h"

extern const Kernels kernels_neon;
constexpr Kernels kernels_neon = make_kernels("neon");
