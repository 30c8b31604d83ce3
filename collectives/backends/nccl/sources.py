"""The kernels of the GPU, as text: they convert and scale numbers while they pack tensors into one memory. Pure.

The text is a common part of C++ and CUDA, so a compiler for the host can run it, too. 16-bit floats are computed in
float32; integers are scaled in float64, truncated and wrapped, as :mod:`collectives.kernels.reduction` does it.
"""

from __future__ import annotations

from collectives.api import DType, ReduceOp
from collectives.backends.nccl.interface import DTypeConversion

PIECES = 120
"""The number of tensors of one call: their addresses are arguments of the kernel, which has 4 KiB for these."""

_STORAGE = {
    DType.UINT8: "unsigned char",
    DType.INT8: "signed char",
    DType.INT16: "short",
    DType.INT32: "int",
    DType.INT64: "long long",
    DType.FLOAT16: "unsigned short",
    DType.BFLOAT16: "unsigned short",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
    DType.BOOL: "unsigned char",
}
_KINDS = {DType.FLOAT16: "HALF", DType.BFLOAT16: "BRAIN", DType.FLOAT32: "SINGLE", DType.FLOAT64: "DOUBLE"}


def source(conversion: DTypeConversion) -> str:
    """The kernels for ``conversion``: pack, unpack, fill, scale, combine, products."""
    defines = _defines(conversion)
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + _BODY


def _defines(conversion: DTypeConversion) -> dict[str, str]:
    dtype, kind = conversion.dtype, _KINDS.get(conversion.dtype, "INTEGER")
    is_wide = conversion.carrier.itemsize == 8
    return {
        "NUMBER": _STORAGE[dtype],
        "CARRIER": _STORAGE[conversion.carrier],
        kind: "1",
        "WIDE": {"INTEGER": "long long", "DOUBLE": "double"}.get(kind, "float"),
        "KEY": {None: "0", ReduceOp.MAX: "1", ReduceOp.MIN: "2"}[conversion.key],
        "HIGHEST": "0x7fffffffffffffffLL" if is_wide else "0x7fffffff",
        "DIVISOR": f"{conversion.divisor}LL",
        "IS_COPY": str(int(conversion.is_copy)),
        "PIECES": str(PIECES),
    }


_BODY = r"""
typedef long long Long;
struct Piece { Long at; unsigned long long memory; Long count; };
struct Pieces { Piece piece[PIECES]; };
struct Floats { const void* upper; const void* lower; double factor; };

template <typename To, typename From> static __device__ To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    union { From from; To to; } both;
    both.from = value;
    return both.to;
}

#ifdef __CUDA_ARCH__
static __device__ float half_to_float(unsigned short half) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
    return result;
}
static __device__ unsigned short float_to_half(float number) {
    unsigned short result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(number));
    return result;
}
#else
static __device__ float half_to_float(unsigned short half) { return (float)bits_of<_Float16>(half); }
static __device__ unsigned short float_to_half(float number) { return bits_of<unsigned short>((_Float16)number); }
#endif

static __device__ float brain_to_float(unsigned short brain) { return bits_of<float>((unsigned)brain << 16); }
static __device__ unsigned short float_to_brain(float number) {
    unsigned bits = bits_of<unsigned>(number);
    return number != number ? 0x7fc0 : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static __device__ WIDE widen(NUMBER number) {
#if defined(HALF)
    return half_to_float(number);
#elif defined(BRAIN)
    return brain_to_float(number);
#else
    return (WIDE)number;
#endif
}

static __device__ NUMBER narrow(WIDE number) {
#if defined(HALF)
    return float_to_half(number);
#elif defined(BRAIN)
    return float_to_brain(number);
#else
    return (NUMBER)number;
#endif
}

static __device__ WIDE scaled(WIDE number, double factor) {
    if (factor == 1.0) return number;
#if defined(INTEGER)
    return (WIDE)((double)number * factor);
#else
    return number * (WIDE)factor;
#endif
}

static __device__ CARRIER carried(NUMBER number, double factor) {
    WIDE value = scaled(widen(number), factor);
#if KEY
    if (value != value) return KEY == 1 ? HIGHEST : -HIGHEST - 1;
    CARRIER bits = bits_of<CARRIER>(value);
    return bits < 0 ? bits ^ HIGHEST : bits;
#elif defined(INTEGER)
    return DIVISOR == 1 ? (CARRIER)(NUMBER)value : (CARRIER)value;
#else
    return narrow(value);
#endif
}

static __device__ NUMBER returned(CARRIER number, double factor) {
#if KEY
    CARRIER bits = number < 0 ? number ^ HIGHEST : number;
    return narrow(scaled(bits_of<WIDE>(bits), factor));
#elif defined(INTEGER)
    if (DIVISOR == 1) return (NUMBER)scaled((WIDE)(NUMBER)number, factor);
    return factor == 1.0 ? (NUMBER)(number / DIVISOR) : (NUMBER)(Long)((double)number * factor / DIVISOR);
#else
    return narrow(scaled(widen(number), factor));
#endif
}

struct alignas(16) Sixteen { unsigned word[4]; };

template <typename Unit>
static __device__ void copy_units(const char* from, char* to, Long bytes, Long first, Long step) {
    const Unit* source = (const Unit*)from;
    Unit* target = (Unit*)to;
    for (Long i = first; i < bytes / (Long)sizeof(Unit); i += step) target[i] = source[i];
    for (Long i = bytes - bytes % (Long)sizeof(Unit) + first; i < bytes; i += step) to[i] = from[i];
}

static __device__ void copy(const void* from, void* to, Long bytes, Long first, Long step) {
    unsigned long long ends = (unsigned long long)from | (unsigned long long)to;
    if (ends % 16 == 0) copy_units<Sixteen>((const char*)from, (char*)to, bytes, first, step);
    else if (ends % 4 == 0) copy_units<unsigned>((const char*)from, (char*)to, bytes, first, step);
    else copy_units<char>((const char*)from, (char*)to, bytes, first, step);
}

#define FIRST ((Long)blockIdx.x * blockDim.x + threadIdx.x)
#define STEP ((Long)gridDim.x * blockDim.x)

extern "C" __global__ void pack(Pieces pieces, CARRIER* room, double factor) {
    Piece piece = pieces.piece[blockIdx.y];
    const NUMBER* source = (const NUMBER*)piece.memory;
    CARRIER* target = room + piece.at;
    if (IS_COPY && factor == 1.0) return copy(source, target, piece.count * sizeof(NUMBER), FIRST, STEP);
    for (Long i = FIRST; i < piece.count; i += STEP) target[i] = carried(source[i], factor);
}

extern "C" __global__ void unpack(Pieces pieces, const CARRIER* room, double factor) {
    Piece piece = pieces.piece[blockIdx.y];
    NUMBER* target = (NUMBER*)piece.memory;
    const CARRIER* source = room + piece.at;
    if (IS_COPY && factor == 1.0) return copy(source, target, piece.count * sizeof(NUMBER), FIRST, STEP);
    for (Long i = FIRST; i < piece.count; i += STEP) target[i] = returned(source[i], factor);
}

extern "C" __global__ void fill(NUMBER* target, Long count, unsigned long long bits) {
    union { unsigned long long bits; NUMBER number; } value;
    value.bits = bits;
    for (Long i = FIRST; i < count; i += STEP) target[i] = value.number;
}

extern "C" __global__ void scale(const NUMBER* source, NUMBER* target, Long count, double factor) {
    if (factor == 1.0) return copy(source, target, count * sizeof(NUMBER), FIRST, STEP);
    for (Long i = FIRST; i < count; i += STEP) target[i] = narrow(scaled(widen(source[i]), factor));
}

#ifndef INTEGER
typedef const unsigned short* Halves;

static __device__ WIDE read(Floats floats, Long i) {
    if (!floats.lower) return widen(((const NUMBER*)floats.upper)[i]);
    unsigned bits = (unsigned)((Halves)floats.upper)[i] << 16 | ((Halves)floats.lower)[i];
    return (WIDE)bits_of<float>(bits);
}

extern "C" __global__ void combine(void* upper, void* lower, Floats first, Floats second, Long count) {
    for (Long i = FIRST; i < count; i += STEP) {
        WIDE sum = read(first, i) * (WIDE)first.factor + read(second, i) * (WIDE)second.factor;
        if (lower) {
            unsigned bits = bits_of<unsigned>((float)sum);
            ((unsigned short*)upper)[i] = (unsigned short)(bits >> 16);
            ((unsigned short*)lower)[i] = (unsigned short)bits;
        } else {
            ((NUMBER*)upper)[i] = narrow(sum);
        }
    }
}

/* Three sums for each thread; the host adds up the sums of the threads, always in the same order. */
extern "C" __global__ void products(double* sums, Floats first, Floats second, Long count) {
    double crossed = 0.0, ones = 0.0, others = 0.0;
    for (Long i = FIRST; i < count; i += STEP) {
        double one = read(first, i), other = read(second, i);
        crossed += one * other;
        ones += one * one;
        others += other * other;
    }
    sums[3 * FIRST] = crossed;
    sums[3 * FIRST + 1] = ones;
    sums[3 * FIRST + 2] = others;
}
#endif
"""
