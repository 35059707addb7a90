/* Read and write frames (see ipc/frames.py) over a descriptor. */

#include "c.h"
#include <poll.h>
#include <sched.h>
#include <time.h>

static const uint8_t MAGIC[] = {MAGIC_BYTES};

/* A large frame is read in pieces of this size: the CRC of each is computed while it is in the CPU's cache. */
static const Py_ssize_t PIECE_BYTES = (Py_ssize_t)1 << 18;

/* Update `chain`, the CRC of the previous header, to that of this one. */
static int extend_chain(const uint8_t *head, uint32_t *chain) { return add_to_crc(head, AT_CRC, chain); }

static void write_uint32(uint8_t *to, uint32_t number) {
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(number >> 8 * i);
}

uint32_t read_uint32(const uint8_t *from) {
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

int add_buffer(Buffers *buffers, PyObject *object, int flags) {
    if (buffers->count == MAX_BUFFERS) {
        PyErr_SetString(PyExc_ValueError, "too many buffers");
        return -1;
    }
    Py_buffer *view = &buffers->views[buffers->count];
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    buffers->parts[buffers->count++] = (struct iovec){view->buf, (size_t)view->len};
    return 0;
}

void release_buffers(Buffers *buffers) {
    for (int i = 0; i < buffers->count; i++)
        PyBuffer_Release(&buffers->views[i]);
}

int prepend_header(Buffers *buffers, uint8_t *head, uint32_t kind, uint32_t request, uint32_t generation,
                   Py_ssize_t size, Py_ssize_t payload, uint32_t body, uint32_t *chain) {
    memcpy(head, MAGIC, sizeof MAGIC);
    head[AT_VERSION] = VERSION;
    head[AT_KIND] = (uint8_t)kind;
    write_uint32(head + AT_REQUEST, request);
    write_uint32(head + AT_GENERATION, generation);
    write_uint32(head + AT_FIXED, (uint32_t)size);
    write_uint32(head + AT_PAYLOAD, (uint32_t)payload);
    write_uint32(head + AT_BODY_CRC, body);
    if (extend_chain(head, chain) < 0)
        return -1;
    write_uint32(head + AT_CRC, *chain);
    memmove(buffers->parts + 1, buffers->parts, (size_t)buffers->count * sizeof *buffers->parts);
    buffers->parts[0] = (struct iovec){head, HEADER_BYTES};
    return 0;
}

PyObject *write_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    uint32_t chain, kind, request, generation, body = 0;
    if (argc != 7) {
        PyErr_SetString(PyExc_TypeError, "write_frame: expected 7 arguments");
        return NULL;
    }
    int fd = (int)PyLong_AsLong(args[0]);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (as_uint32(args[1], &chain) || as_uint32(args[2], &kind) || as_uint32(args[3], &request) ||
        as_uint32(args[4], &generation) || kind > UINT8_MAX)
        Py_RETURN_NONE;
    PyObject *fixed = PySequence_Fast(args[5], "fixed: expected a sequence of buffers"), *result = NULL;
    if (fixed == NULL)
        return NULL;
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    Py_ssize_t parts = PySequence_Fast_GET_SIZE(fixed), size = 0, payload = 0;
    if (parts + 1 > MAX_BUFFERS) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    for (Py_ssize_t i = 0; i <= parts; i++) {
        if (PySequence_Fast_GET_SIZE(fixed) != parts) { /* computing a large CRC releases the GIL */
            PyErr_SetString(PyExc_ValueError, "write_frame: the list of buffers changed during the call");
            goto done;
        }
        PyObject *part = i < parts ? PySequence_Fast_GET_ITEM(fixed, i) : args[6];
        if (add_buffer(&buffers, part, PyBUF_SIMPLE) < 0)
            goto done;
        const Py_buffer *view = &buffers.views[buffers.count - 1];
        *(i < parts ? &size : &payload) += view->len;
        if (add_to_crc(view->buf, view->len, &body) < 0)
            goto done;
    }
    if (size > MAX_FIXED || payload > MAX_PAYLOAD) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (prepend_header(&buffers, head, kind, request, generation, size, payload, body, &chain) < 0)
        goto done;
    ssize_t written;
    int error;
    Py_BEGIN_ALLOW_THREADS
    written = writev(fd, buffers.parts, buffers.count + 1);
    error = errno;
    Py_END_ALLOW_THREADS
    if (written < 0 && error != EAGAIN && error != EWOULDBLOCK && error != EINTR) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (written == HEADER_BYTES + size + payload) {
        result = PyLong_FromUnsignedLong(chain);
    } else {
        result = Py_BuildValue("(ky#n)", (unsigned long)chain, (char *)head, (Py_ssize_t)HEADER_BYTES,
                               (Py_ssize_t)(written < 0 ? 0 : written));
    }
done:
    release_buffers(&buffers);
    Py_DECREF(fixed);
    return result;
}

uint32_t payload_size(const Buffers *buffers) {
    return read_uint32((const uint8_t *)buffers->views[0].buf + AT_PAYLOAD);
}

/* Add `size` bytes of the predicted buffers, from an offset on, to a CRC. Return -1 with an exception. */
static int add_predicted_to_crc(const Buffers *buffers, Py_ssize_t offset, Py_ssize_t size, uint32_t *crc) {
    for (int i = 1; size; i++) {
        const Py_buffer *view = &buffers->views[i];
        if (offset >= view->len) {
            offset -= view->len;
            continue;
        }
        Py_ssize_t here = view->len - offset < size ? view->len - offset : size;
        if (add_to_crc((const char *)view->buf + offset, here, crc) < 0)
            return -1;
        offset = 0;
        size -= here;
    }
    return 0;
}

/* Return whether a frame's header has this body's CRC and follows the header before it; -1: exception. */
static int header_matches(const uint8_t *head, uint32_t chain, uint32_t body) {
    if (memcmp(head, MAGIC, sizeof MAGIC) || head[AT_VERSION] != VERSION)
        return 0;
    if (extend_chain(head, &chain) < 0)
        return -1;
    return body == read_uint32(head + AT_BODY_CRC) && chain == read_uint32(head + AT_CRC);
}

int crcs_match(uint32_t chain, const Buffers *buffers, Py_ssize_t size, const uint8_t *payload,
               Py_ssize_t payload_bytes) {
    uint32_t body = 0;
    if (add_predicted_to_crc(buffers, 0, size, &body) < 0 || add_to_crc(payload, payload_bytes, &body) < 0)
        return -1;
    return header_matches(buffers->views[0].buf, chain, body);
}

int contiguous_crcs_match(uint32_t chain, const uint8_t *head, const uint8_t *body, Py_ssize_t size) {
    uint32_t crc = 0;
    return add_to_crc(body, size, &crc) < 0 ? -1 : header_matches(head, chain, crc);
}

static Py_ssize_t predicted_size(const Buffers *buffers) {
    Py_ssize_t size = 0;
    for (int i = 1; i < buffers->count - 1; i++)
        size += buffers->views[i].len;
    return size;
}

/* Read once into the buffers from an offset on, up to `limit` bytes. */
static ssize_t read_from(int fd, const Buffers *buffers, Py_ssize_t offset, Py_ssize_t limit) {
    struct iovec parts[MAX_BUFFERS];
    int count = 0;
    for (int i = 0; i < buffers->count && limit; i++) {
        struct iovec part = buffers->parts[i];
        if (offset >= (Py_ssize_t)part.iov_len) {
            offset -= (Py_ssize_t)part.iov_len;
            continue;
        }
        part.iov_base = (char *)part.iov_base + offset;
        part.iov_len -= (size_t)offset;
        offset = 0;
        if (part.iov_len > (size_t)limit)
            part.iov_len = (size_t)limit;
        limit -= (Py_ssize_t)part.iov_len;
        parts[count++] = part;
    }
    return readv(fd, parts, count);
}

ssize_t read_in_pieces(int fd, const Buffers *buffers, CheckedBytes *checked) {
    Py_ssize_t size = predicted_size(buffers), whole = HEADER_BYTES + size, count = 0;
    *checked = (CheckedBytes){0, 0};
    if (size < 2 * PIECE_BYTES)
        return readv(fd, buffers->parts, buffers->count);
    do {
        ssize_t more = read_from(fd, buffers, count, whole - count > PIECE_BYTES ? PIECE_BYTES : PY_SSIZE_T_MAX);
        if (more <= 0) /* after some bytes, the next read meets the end or the error again */
            return count ? count : more;
        count += more;
        if (count < HEADER_BYTES || read_uint32((const uint8_t *)buffers->views[0].buf + AT_FIXED) != (size_t)size)
            return count;
        Py_ssize_t here = (count < whole ? count : whole) - HEADER_BYTES - checked->count;
        if (add_predicted_to_crc(buffers, checked->count, here, &checked->crc) < 0)
            return -2;
        checked->count += here;
    } while (count < whole);
    return count;
}

int starts_with_frame(Py_ssize_t count, uint32_t chain, const Buffers *buffers, const CheckedBytes *checked,
                      Py_ssize_t *more) {
    const uint8_t *head = buffers->views[0].buf;
    const Py_buffer *spill = &buffers->views[buffers->count - 1];
    Py_ssize_t size = predicted_size(buffers);
    if (count < HEADER_BYTES + size || read_uint32(head + AT_FIXED) != (size_t)size)
        return 0;
    uint32_t payload = payload_size(buffers);
    *more = count - HEADER_BYTES - size - payload;
    if (payload > spill->len || *more < 0)
        return 0;
    if (checked == NULL || checked->count < size)
        return crcs_match(chain, buffers, size, spill->buf, payload);
    uint32_t body = checked->crc;
    return add_to_crc(spill->buf, payload, &body) < 0 ? -1 : header_matches(head, chain, body);
}

int is_one_frame(Py_ssize_t count, uint32_t chain, const Buffers *buffers) {
    Py_ssize_t more = 0;
    if (count >= HEADER_BYTES && payload_size(buffers))
        return 0;
    int whole = starts_with_frame(count, chain, buffers, NULL, &more);
    return whole == 1 && more ? 0 : whole;
}

PyObject *read_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    uint32_t chain;
    if (argc != 3 || !PyList_Check(args[2]) || as_uint32(args[1], &chain)) {
        PyErr_SetString(PyExc_TypeError, "read_frame: expected a descriptor, a CRC and a list");
        return NULL;
    }
    int fd = (int)PyLong_AsLong(args[0]);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    PyObject *result = NULL;
    Buffers buffers = {.count = 0};
    Py_ssize_t parts = PyList_GET_SIZE(args[2]);
    for (Py_ssize_t i = 0; i < parts && i < MAX_BUFFERS; i++)
        if (add_buffer(&buffers, PyList_GET_ITEM(args[2], i), PyBUF_WRITABLE) < 0)
            goto done;
    ssize_t count;
    int error;
    do {
        Py_BEGIN_ALLOW_THREADS
        count = readv(fd, buffers.parts, buffers.count);
        error = errno;
        Py_END_ALLOW_THREADS
        if (count < 0 && error == EINTR && PyErr_CheckSignals() < 0)
            goto done;
    } while (count < 0 && error == EINTR);
    if (count < 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        goto done;
    }
    int whole = 0;
    if (count >= HEADER_BYTES && parts == buffers.count && parts >= 2 && buffers.views[0].len == HEADER_BYTES) {
        whole = is_one_frame(count, chain, &buffers);
        if (whole < 0)
            goto done;
    }
    if (whole) {
        const uint8_t *head = buffers.views[0].buf;
        result =
            Py_BuildValue("(ikkkkkk)", head[AT_KIND], (unsigned long)read_uint32(head + AT_REQUEST),
                          (unsigned long)read_uint32(head + AT_GENERATION), (unsigned long)read_uint32(head + AT_FIXED),
                          (unsigned long)read_uint32(head + AT_PAYLOAD), (unsigned long)read_uint32(head + AT_BODY_CRC),
                          (unsigned long)read_uint32(head + AT_CRC));
    } else {
        result = PyLong_FromSsize_t(count);
    }
done:
    release_buffers(&buffers);
    return result;
}

int prepare_read(References *refs, PyObject *decoder, PyObject *into, Buffers *buffers, uint32_t *chain) {
    PyObject *error = look_up(refs, decoder, str_error), *header = look_up(refs, decoder, str__header);
    PyObject *wanted = look_up(refs, decoder, str__wanted), *frames = look_up(refs, decoder, str_frames);
    PyObject *head = look_up(refs, decoder, str__head), *spill = look_up(refs, decoder, str__spill);
    PyObject *before = look_up(refs, decoder, str_chain);
    if (PyErr_Occurred())
        return -1;
    if (error != Py_None || header != Py_None || !PyList_CheckExact(wanted) || PyList_GET_SIZE(wanted) != 1 ||
        PyList_GET_ITEM(wanted, 0) != head || PyObject_Size(frames) || as_uint32(before, chain) ||
        PyList_GET_SIZE(into) > MAX_BUFFERS - 2)
        return PyErr_Occurred() ? -1 : 0;
    if (add_buffer(buffers, head, PyBUF_WRITABLE) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(into); i++)
        if (add_buffer(buffers, PyList_GET_ITEM(into, i), PyBUF_WRITABLE) < 0)
            return -1;
    return add_buffer(buffers, spill, PyBUF_WRITABLE) < 0 ? -1 : buffers->views[0].len == HEADER_BYTES;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int spin_until_readable(int fd, double seconds) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    double end = seconds_now() + seconds;
    int ready, expired = 0;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        ready = poll(&poll_fd, 1, 0);
        if (ready > 0 || expired)
            break;
        sched_yield(); /* the parent may be about to write on this CPU */
        /* Then poll once more: another process may have used this CPU since the last poll. */
        expired = !(seconds_now() <= end);
    }
    Py_END_ALLOW_THREADS
    return ready > 0; /* the read that follows reports an error */
}

PyObject *spin(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 2) {
        PyErr_SetString(PyExc_TypeError, "spin: expected a descriptor and seconds");
        return NULL;
    }
    int fd = (int)PyLong_AsLong(args[0]);
    double seconds = PyFloat_AsDouble(args[1]);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(spin_until_readable(fd, seconds));
}
