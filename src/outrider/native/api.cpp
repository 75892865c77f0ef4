// The C interface. Which instruction set runs is decided here, once, by what this CPU can do.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <vector>

#include "forward.h"
#include "pack.h"
#include "pool.h"
#include "quantise.h"
#include "roll.h"
#include "table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

extern const Kernels kernels_portable;
#ifdef OUTRIDER_HAS_NEON
extern const Kernels kernels_neon;
#endif
#ifdef OUTRIDER_HAS_I8MM
extern const Kernels kernels_i8mm;
#endif
#ifdef OUTRIDER_HAS_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef OUTRIDER_HAS_AVX512BW
extern const Kernels kernels_avx512bw;
#endif
#ifdef OUTRIDER_HAS_AVX512
extern const Kernels kernels_avx512;
#endif

namespace {

constexpr int ABI = 5;  // native/library.py names the same number

#ifdef OUTRIDER_HAS_NEON
bool has_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found;
#else
    return false;
#endif
}
#endif

#ifdef OUTRIDER_HAS_I8MM
bool has_matmul() {
#if defined(__linux__)
    constexpr unsigned long I8MM = 1 << 13;  // HWCAP2_I8MM, which older headers do not have
    return getauxval(AT_HWCAP2) & I8MM;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__)
// With what isa_avx2.cpp is compiled for. Older compilers do not know "f16c" as a name.
bool has_avx2() {
    unsigned eax, ebx, ecx, edx;
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Best first.
std::vector<const Kernels *> usable() {
    std::vector<const Kernels *> sets;
#ifdef OUTRIDER_HAS_AVX512
    if (has_avx512() && __builtin_cpu_supports("avx512vnni")) sets.push_back(&kernels_avx512);
#endif
#ifdef OUTRIDER_HAS_AVX512BW
    if (has_avx512()) sets.push_back(&kernels_avx512bw);
#endif
#ifdef OUTRIDER_HAS_AVX2
    if (has_avx2()) sets.push_back(&kernels_avx2);
#endif
#ifdef OUTRIDER_HAS_I8MM
    if (has_dot_product() && has_matmul()) sets.push_back(&kernels_i8mm);
#endif
#ifdef OUTRIDER_HAS_NEON
    if (has_dot_product()) sets.push_back(&kernels_neon);
#endif
    sets.push_back(&kernels_portable);
    return sets;
}

const Kernels *&chosen() {
    static const Kernels *kernels = usable().front();
    return kernels;
}

}  // namespace

const SamplingKernels &sampling_kernels(void) { return chosen()->sampling; }

API int outrider_abi() { return ABI; }

API const char *outrider_isas() {
    static const std::string names = [] {
        std::string all;
        for (const Kernels *set : usable()) all += (all.empty() ? "" : ",") + std::string(set->name);
        return all;
    }();
    return names.c_str();
}

API int outrider_select(const char *name) {
    for (const Kernels *set : usable())
        if (!strcmp(set->name, name)) {
            chosen() = set;
            return 0;
        }
    return 1;
}

API const char *outrider_selected() { return chosen()->name; }

API void outrider_set_threads(int count) { Pool::get().resize(std::max(1, count)); }

API int outrider_threads() { return Pool::get().size(); }

API int outrider_lanes() { return chosen()->lanes; }

// Bytes of a matrix in tiles; 0 when this type or number of columns cannot be packed.
API int64_t outrider_packed_bytes(int type, int64_t rows, int64_t columns) {
    const int lanes = chosen()->lanes;
    return (rows + lanes - 1) / lanes * tile_bytes(type, columns, lanes);
}

// From rows as the file has them to tiles at matrix->data. Fills in matrix->tile_bytes. 1: a scale is not a number.
API int outrider_pack(Matrix *matrix, const uint8_t *stored) {
    const int lanes = chosen()->lanes, tiles = (matrix->rows + lanes - 1) / lanes;
    matrix->tile_bytes = tile_bytes(matrix->type, matrix->columns, lanes);
    const int step = 16;
    std::atomic<int> broken{0};
    Pool &pool = Pool::get();
    pool.run([&] {
        pool.share((tiles + step - 1) / step, [&](int item) {
            const int first = item * step, last = std::min(first + step, tiles);
            pack_tiles(*matrix, stored, first, last, lanes, const_cast<uint8_t *>(matrix->data));
            if (!has_sound_scales(*matrix, stored, first * lanes, std::min(last * lanes, matrix->rows))) broken = 1;
        });
    });
    return broken;
}

// Some rows of a packed matrix as another, at to->data. Fills in to->tile_bytes.
API void outrider_take(const Matrix *from, const int32_t *rows, Matrix *to) {
    const int lanes = chosen()->lanes;
    to->tile_bytes = from->tile_bytes;
    uint8_t *out = const_cast<uint8_t *>(to->data);
    memset(out, 0, size_t((to->rows + lanes - 1) / lanes * to->tile_bytes));  // rows beyond the last are zero
    for (int row = 0; row < to->rows; row++) copy_row(*from, rows[row], *to, row, lanes, out);
}

API void outrider_unpack(const Matrix *matrix, const int32_t *rows, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at++)
        unpack_row(*matrix, rows[at], chosen()->lanes, out + at * matrix->columns);
}

// Rows of numbers, of whole blocks, as a file has them in Q4_1. weights: see quantise_block, one for each column.
API void outrider_quantise(const float *rows, int64_t num_rows, int64_t columns, const float *weights, uint8_t *stored) {
    const int64_t blocks = columns / Q4_1_BLOCK;
    Pool &pool = Pool::get();
    pool.run([&] {
        pool.share(int(num_rows), [&](int row) {
            for (int64_t block = 0; block < blocks; block++) {
                const float *numbers = rows + row * columns + block * Q4_1_BLOCK;
                const float *counts = weights ? weights + block * Q4_1_BLOCK : nullptr;
                quantise_block(numbers, counts, stored + (row * blocks + block) * Q4_1_BYTES);
            }
        });
    });
}

// 1: there is no memory for it.
API int outrider_forward(const Model *model, const Pass *pass) {
    try {
        forward(*model, *pass, *chosen());
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}

// 1: there is no memory for it. 2: a row was unusable.
API int outrider_roll(const Model *model, const Pass *first, const Roll *roll) {
    try {
        return roll_on(*model, *first, *roll, *chosen()) ? 0 : 2;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// Rows times a matrix, for heads that sit on a model, and for tests.
API int outrider_multiply(const Matrix *matrix, const float *rows, int64_t count, float *out) {
    try {
        multiply_rows(*matrix, rows, int(count), out, *chosen());
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}
