/* zlib's CRC-32, for frames. */

#include "c.h"

/* From this size on, the GIL is released. */
static const Py_ssize_t RELEASE_GIL_BYTES = (Py_ssize_t)1 << 18;

static int add_with_zlib(const void *bytes, Py_ssize_t count, uint32_t *crc) {
    PyObject *view = PyMemoryView_FromMemory((char *)bytes, count, PyBUF_READ);
    PyObject *before = view == NULL ? NULL : PyLong_FromUnsignedLong(*crc), *arguments[] = {view, before};
    PyObject *after = before == NULL ? NULL : PyObject_Vectorcall(zlib_crc32, arguments, 2, NULL);
    if (after != NULL)
        *crc = (uint32_t)PyLong_AsUnsignedLong(after);
    Py_XDECREF(view);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return after == NULL ? -1 : 0;
}

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

/* Each block of 16 bytes is multiplied by powers of x modulo the polynomial, with the bits in reverse, and added to
 * a later block. See V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction",
 * Intel, 2009, for the method and these constants of zlib's polynomial. */
static const uint64_t FOLD_64[2] = {0x154442bd4, 0x1c6e41596}, FOLD_16[2] = {0x1751997d0, 0x0ccaa009e};
static const uint64_t FOLD_4[2] = {0x163cd6124, 0}, BARRETT[2] = {0x1db710641, 0x1f7011641};

/* Compilers that know the instructions which multiply two or four blocks at once. */
#if defined(__clang__) ? __clang_major__ >= 8 : __GNUC__ >= 9
#define CAN_BE_WIDE 1
#define has_wide_clmul(vectors) (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports(vectors))
#else
#define CAN_BE_WIDE 0
#define has_wide_clmul(vectors) 0
#endif

static uint32_t byte_table[256];
static int has_clmul, blocks_at_once;

int set_up_crc(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
        byte_table[byte] = crc;
    }
    has_clmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    blocks_at_once = has_wide_clmul("avx512f") ? 4 : has_wide_clmul("avx2") ? 2 : 1;
    return has_clmul;
}

#define WITH_CLMUL __attribute__((target("pclmul,sse4.1")))

WITH_CLMUL static __m128i load(const void *from) { return _mm_loadu_si128((const __m128i *)from); }

WITH_CLMUL static __m128i fold(__m128i bytes, __m128i factor, __m128i addend) {
    __m128i low = _mm_clmulepi64_si128(bytes, factor, 0x00), high = _mm_clmulepi64_si128(bytes, factor, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), addend);
}

#if CAN_BE_WIDE

/* From this size on, the wide instructions are faster. */
#define WIDE_BYTES 512
#define WITH_FOUR __attribute__((target("vpclmulqdq,avx512f")))
#define WITH_TWO __attribute__((target("vpclmulqdq,avx2")))

static const uint64_t FOLD_256[2] = {0x11542778a, 0x1322d1430};

WITH_FOUR static __m512i load_four(const uint8_t *from) { return _mm512_loadu_si512(from); }

WITH_FOUR static __m512i repeat_four(const uint64_t *from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
}

WITH_FOUR static __m512i fold_four(__m512i bytes, __m512i factor, __m512i addend) {
    __m512i low = _mm512_clmulepi64_epi128(bytes, factor, 0x00), high = _mm512_clmulepi64_epi128(bytes, factor, 0x11);
    return _mm512_ternarylogic_epi64(low, high, addend, 0x96); /* XOR of the three */
}

/* Fold 512 or more bytes to 64, to which bytes that follow can be added, four blocks at once. Return how many were
 * folded. */
WITH_FOUR static Py_ssize_t fold_by_four(const uint8_t *bytes, Py_ssize_t count, uint32_t crc, uint8_t *folded) {
    const uint8_t *from = bytes, *end = bytes + count;
    __m512i one = _mm512_xor_si512(load_four(from), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    __m512i two = load_four(from + 64), three = load_four(from + 128), four = load_four(from + 192);
    __m512i factor = repeat_four(FOLD_256);
    for (from += 256; end - from >= 256; from += 256) {
        one = fold_four(one, factor, load_four(from));
        two = fold_four(two, factor, load_four(from + 64));
        three = fold_four(three, factor, load_four(from + 128));
        four = fold_four(four, factor, load_four(from + 192));
    }
    factor = repeat_four(FOLD_64);
    one = fold_four(fold_four(fold_four(one, factor, two), factor, three), factor, four);
    _mm512_storeu_si512(folded, one);
    return from - bytes;
}

WITH_TWO static __m256i load_two(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

WITH_TWO static __m256i repeat_two(const uint64_t *from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
}

WITH_TWO static __m256i fold_two(__m256i bytes, __m256i factor, __m256i addend) {
    __m256i low = _mm256_clmulepi64_epi128(bytes, factor, 0x00), high = _mm256_clmulepi64_epi128(bytes, factor, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), addend);
}

/* The same, two blocks at once. */
WITH_TWO static Py_ssize_t fold_by_two(const uint8_t *bytes, Py_ssize_t count, uint32_t crc, uint8_t *folded) {
    const uint8_t *from = bytes, *end = bytes + count;
    __m256i parts[8], factor = repeat_two(FOLD_256);
    for (int i = 0; i < 8; i++)
        parts[i] = load_two(from + 32 * i);
    parts[0] = _mm256_xor_si256(parts[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc)));
    for (from += 256; end - from >= 256; from += 256)
        for (int i = 0; i < 8; i++)
            parts[i] = fold_two(parts[i], factor, load_two(from + 32 * i));
    factor = repeat_two(FOLD_64);
    for (int i = 0; i < 6; i++)
        parts[i + 2] = fold_two(parts[i], factor, parts[i + 2]);
    _mm256_storeu_si256((__m256i *)folded, parts[6]);
    _mm256_storeu_si256((__m256i *)(folded + 32), parts[7]);
    return from - bytes;
}

#endif

/* Return the CRC of one or more blocks of 16 bytes. */
WITH_CLMUL static uint32_t crc_of_blocks(const uint8_t *bytes, Py_ssize_t count, uint32_t crc) {
    const uint8_t *end = bytes + count, *first = bytes;
#if CAN_BE_WIDE
    uint8_t folded[64];
    if (blocks_at_once > 1 && count >= WIDE_BYTES) {
        bytes += (blocks_at_once == 4 ? fold_by_four : fold_by_two)(bytes, count, crc, folded) - 64;
        first = folded;
        crc = 0;
    }
#endif
    __m128i one = _mm_xor_si128(load(first), _mm_cvtsi32_si128((int)crc)), factor = load(FOLD_64);
    bytes += 16;
    if (count >= 64) {
        __m128i two = load(first + 16), three = load(first + 32), four = load(first + 48);
        for (bytes += 48; end - bytes >= 64; bytes += 64) {
            one = fold(one, factor, load(bytes));
            two = fold(two, factor, load(bytes + 16));
            three = fold(three, factor, load(bytes + 32));
            four = fold(four, factor, load(bytes + 48));
        }
        factor = load(FOLD_16);
        one = fold(fold(fold(one, factor, two), factor, three), factor, four);
    }
    for (factor = load(FOLD_16); bytes < end; bytes += 16)
        one = fold(one, factor, load(bytes));
    __m128i words = _mm_setr_epi32(~0, 0, ~0, 0), rest = load(BARRETT);
    one = _mm_xor_si128(_mm_srli_si128(one, 8), _mm_clmulepi64_si128(one, factor, 0x10));
    __m128i low = _mm_clmulepi64_si128(_mm_and_si128(one, words), load(FOLD_4), 0x00);
    one = _mm_xor_si128(_mm_srli_si128(one, 4), low);
    __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(one, words), rest, 0x10), words);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(one, _mm_clmulepi64_si128(quotient, rest, 0x00)), 1);
}

static uint32_t crc_with_clmul(const uint8_t *bytes, Py_ssize_t count, uint32_t crc) {
    Py_ssize_t block_bytes = count & ~(Py_ssize_t)15;
    crc = ~crc;
    if (block_bytes)
        crc = crc_of_blocks(bytes, block_bytes, crc);
    for (Py_ssize_t i = block_bytes; i < count; i++)
        crc = crc >> 8 ^ byte_table[(crc ^ bytes[i]) & 0xff];
    return ~crc;
}

int add_to_crc(const void *bytes, Py_ssize_t count, uint32_t *crc) {
    if (!count)
        return 0;
    if (!has_clmul)
        return add_with_zlib(bytes, count, crc);
    if (count < RELEASE_GIL_BYTES) {
        *crc = crc_with_clmul(bytes, count, *crc);
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    *crc = crc_with_clmul(bytes, count, *crc);
    Py_END_ALLOW_THREADS
    return 0;
}

#else

int set_up_crc(void) { return 0; }

int add_to_crc(const void *bytes, Py_ssize_t count, uint32_t *crc) {
    return count ? add_with_zlib(bytes, count, crc) : 0;
}

#endif

PyObject *crc32_of(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    uint32_t crc;
    if (argc != 2 || as_uint32(args[1], &crc)) {
        PyErr_SetString(PyExc_TypeError, "crc32: expected a buffer and a CRC");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int failed = add_to_crc(view.buf, view.len, &crc);
    PyBuffer_Release(&view);
    return failed ? NULL : PyLong_FromUnsignedLong(crc);
}
