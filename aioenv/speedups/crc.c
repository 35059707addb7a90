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

static uint32_t byte_table[256];
static int has_clmul;

int set_up_crc(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
        byte_table[byte] = crc;
    }
    return has_clmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

#define WITH_CLMUL __attribute__((target("pclmul,sse4.1")))

WITH_CLMUL static __m128i load(const void *from) { return _mm_loadu_si128((const __m128i *)from); }

WITH_CLMUL static __m128i fold(__m128i bytes, __m128i factor, __m128i addend) {
    __m128i low = _mm_clmulepi64_si128(bytes, factor, 0x00), high = _mm_clmulepi64_si128(bytes, factor, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), addend);
}

/* Return the CRC of one or more blocks of 16 bytes. */
WITH_CLMUL static uint32_t crc_of_blocks(const uint8_t *bytes, Py_ssize_t count, uint32_t crc) {
    __m128i one = _mm_xor_si128(load(bytes), _mm_cvtsi32_si128((int)crc)), factor = load(FOLD_64);
    const uint8_t *end = bytes + count;
    bytes += 16;
    if (count >= 64) {
        __m128i two = load(bytes), three = load(bytes + 16), four = load(bytes + 32);
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
