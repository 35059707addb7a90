/* The path of a plain step in C, at both ends of a channel: what Python does there takes microseconds a step, and tens
 * of them with cold caches, while the process at the other end waits.
 *
 * Each function does the usual case of what some Python does, on the same objects, and says where it stopped; Python
 * does the rest. So there is one place that knows every case and says what is wrong, and whether there was a compiler
 * shows in nothing but time. What the functions take and give: _speedups.pyi. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

enum { HEADER_BYTES = 28, OWN_CRC = 24, VERSION = 1, KIND_STEP = 5, KIND_RESULT = 8, MAX_BUFFERS = 128 };
static const Py_ssize_t MAX_FIXED = (Py_ssize_t)1 << 31, MAX_TAIL = (Py_ssize_t)1 << 30;
static const uint8_t MAGIC[2] = {0xa1, 0x0e};

static PyObject *zlib_crc32, *numpy_array, *numpy_scalar, *numpy_bool, *numpy_integer, *numpy_floating;

/* The attributes of Python's objects that C looks at. */
#define NAMES(name)                                                                                                    \
    name(abandoned) name(arrived) name(chain) name(decoder) name(done) name(encoder) name(error) name(express)         \
    name(fd) name(frames) name(generation) name(keep) name(member) name(next) name(open) name(pending)                 \
    name(request) name(requests) name(sent) name(set_result) name(unsent) name(waiting) name(worker)                   \
    name(_head) name(_header) name(_spill) name(_wanted)
#define DECLARE(name) static PyObject *str_##name;
NAMES(DECLARE)

/* ------------------------------------------------------------ frames: see wire/frames.py */

static int crc_of(PyObject *buffer, uint32_t *crc) {
    PyObject *before = PyLong_FromUnsignedLong(*crc);
    if (before == NULL)
        return -1;
    PyObject *arguments[] = {buffer, before};
    PyObject *after = PyObject_Vectorcall(zlib_crc32, arguments, 2, NULL);
    Py_DECREF(before);
    if (after == NULL)
        return -1;
    *crc = (uint32_t)PyLong_AsUnsignedLong(after);
    Py_DECREF(after);
    return 0;
}

/* The CRC of a header, after one whose CRC was `chain`. */
static int chain_on(const uint8_t *head, uint32_t *chain) {
    PyObject *view = PyMemoryView_FromMemory((char *)head, OWN_CRC, PyBUF_READ);
    if (view == NULL)
        return -1;
    int failed = crc_of(view, chain);
    Py_DECREF(view);
    return failed;
}

static void put_word(uint8_t *to, uint32_t number) {
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(number >> 8 * i);
}

static uint32_t word_at(const uint8_t *from) {
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

/* A number of 32 bits; -1 if it is none, without an exception. */
static int as_word(PyObject *object, uint32_t *number) {
    unsigned long long value = object && PyLong_Check(object) ? PyLong_AsUnsignedLongLong(object) : ~0ULL;
    if (PyErr_Occurred())
        PyErr_Clear();
    *number = (uint32_t)value;
    return value > UINT32_MAX ? -1 : 0;
}

/* The buffers of Python objects, while they are read or written. */
typedef struct {
    int count;
    Py_buffer views[MAX_BUFFERS];
    struct iovec parts[MAX_BUFFERS];
} Buffers;

static int add_buffer(Buffers *buffers, PyObject *object, int flags) {
    if (buffers->count == MAX_BUFFERS) {
        PyErr_SetString(PyExc_ValueError, "more buffers than there is room for");
        return -1;
    }
    Py_buffer *view = &buffers->views[buffers->count];
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    buffers->parts[buffers->count++] = (struct iovec){view->buf, (size_t)view->len};
    return 0;
}

static void release_buffers(Buffers *buffers) {
    for (int i = 0; i < buffers->count; i++)
        PyBuffer_Release(&buffers->views[i]);
}

static void put_head(uint8_t *head, uint32_t kind, uint32_t request, uint32_t generation, Py_ssize_t size,
                     Py_ssize_t tail, uint32_t body) {
    memcpy(head, MAGIC, 2);
    head[2] = VERSION;
    head[3] = (uint8_t)kind;
    put_word(head + 4, request);
    put_word(head + 8, generation);
    put_word(head + 12, (uint32_t)size);
    put_word(head + 16, (uint32_t)tail);
    put_word(head + 20, body);
}

static PyObject *write_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    uint32_t chain, kind, request, generation, body = 0;
    if (argc != 7) {
        PyErr_SetString(PyExc_TypeError, "write_frame: expected 7 arguments");
        return NULL;
    }
    int fd = (int)PyLong_AsLong(args[0]);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (as_word(args[1], &chain) || as_word(args[2], &kind) || as_word(args[3], &request) ||
        as_word(args[4], &generation) || kind > UINT8_MAX)
        Py_RETURN_NONE;
    PyObject *fixed = PySequence_Fast(args[5], "fixed: expected a sequence of buffers"), *result = NULL;
    if (fixed == NULL)
        return NULL;
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    Py_ssize_t parts = PySequence_Fast_GET_SIZE(fixed), size = 0, tail = 0;
    if (parts + 2 > MAX_BUFFERS) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    for (Py_ssize_t i = 0; i <= parts; i++) {
        PyObject *part = i < parts ? PySequence_Fast_GET_ITEM(fixed, i) : args[6];
        if (add_buffer(&buffers, part, PyBUF_SIMPLE) < 0)
            goto done;
        Py_ssize_t bytes = buffers.views[buffers.count - 1].len;
        *(i < parts ? &size : &tail) += bytes;
        if (bytes && crc_of(part, &body) < 0)
            goto done;
    }
    if (size > MAX_FIXED || tail > MAX_TAIL) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    put_head(head, kind, request, generation, size, tail, body);
    if (chain_on(head, &chain) < 0)
        goto done;
    put_word(head + OWN_CRC, chain);
    memmove(buffers.parts + 1, buffers.parts, (size_t)buffers.count * sizeof *buffers.parts);
    buffers.parts[0] = (struct iovec){head, HEADER_BYTES};
    ssize_t written;
    int error;
    Py_BEGIN_ALLOW_THREADS
    written = writev(fd, buffers.parts, buffers.count + 1);
    error = errno;
    Py_END_ALLOW_THREADS
    if (written < 0 && error != EAGAIN && error != EWOULDBLOCK && error != EINTR) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (written == HEADER_BYTES + size + tail) {
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

/* Whether what was read into a header's buffer, a guess, and the spill is one whole frame without a tail, in order, whose
 * fixed part fills the guess; -1: exception. */
static int is_whole(Py_ssize_t count, uint32_t chain, const Buffers *buffers) {
    const uint8_t *head = buffers->views[0].buf;
    Py_ssize_t size = 0;
    uint32_t body = 0;
    for (int i = 1; i < buffers->count - 1; i++)
        size += buffers->views[i].len;
    if (memcmp(head, MAGIC, 2) || head[2] != VERSION || word_at(head + 12) != (size_t)size || word_at(head + 16) ||
        count != HEADER_BYTES + size)
        return 0;
    for (int i = 1; i < buffers->count - 1; i++)
        if (buffers->views[i].len && crc_of(buffers->views[i].obj, &body) < 0)
            return -1;
    if (chain_on(head, &chain) < 0)
        return -1;
    return body == word_at(head + 20) && chain == word_at(head + OWN_CRC);
}

static PyObject *read_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    uint32_t chain;
    if (argc != 3 || !PyList_Check(args[2]) || as_word(args[1], &chain)) {
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
        whole = is_whole(count, chain, &buffers);
        if (whole < 0)
            goto done;
    }
    if (whole) {
        const uint8_t *head = buffers.views[0].buf;
        result = Py_BuildValue("(ikkkkkk)", head[3], (unsigned long)word_at(head + 4),
                               (unsigned long)word_at(head + 8), (unsigned long)word_at(head + 12),
                               (unsigned long)word_at(head + 16), (unsigned long)word_at(head + 20),
                               (unsigned long)word_at(head + OWN_CRC));
    } else {
        result = PyLong_FromSsize_t(count);
    }
done:
    release_buffers(&buffers);
    return result;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static PyObject *spin(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 2) {
        PyErr_SetString(PyExc_TypeError, "spin: expected a descriptor and seconds");
        return NULL;
    }
    struct pollfd look = {.fd = (int)PyLong_AsLong(args[0]), .events = POLLIN};
    double end = seconds_now() + PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int ready, late = 0;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        ready = poll(&look, 1, 0);
        if (ready > 0 || late)
            break;
        sched_yield(); /* to a parent that is on this CPU: it may be about to write */
        late = seconds_now() > end; /* then once more: somebody else may have had this CPU since the last look */
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(ready > 0); /* an error shows in the read that follows */
}

/* ------------------------------------------------------------ envs: see batching/autoreset.py and host/single/rows.py */

/* Where results go. */
typedef struct {
    int taken;
    Py_buffer arrays[4]; /* observations, rewards, terminated, truncated */
    PyObject *last;
} Into;

static void release_into(Into *into) {
    while (into->taken)
        PyBuffer_Release(&into->arrays[--into->taken]);
}

static int take_into(PyObject *five, Into *into) {
    into->taken = 0;
    if (!PyTuple_Check(five) || PyTuple_GET_SIZE(five) != 5 || !PyList_Check(PyTuple_GET_ITEM(five, 4))) {
        PyErr_SetString(PyExc_TypeError, "into: expected four arrays and a list");
        return -1;
    }
    for (; into->taken < 4; into->taken++)
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(five, into->taken), &into->arrays[into->taken],
                               PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
            release_into(into);
            return -1;
        }
    into->last = PyTuple_GET_ITEM(five, 4);
    Py_ssize_t rows = PyList_GET_SIZE(into->last);
    const Py_buffer *of = into->arrays;
    if (of[0].ndim < 1 || of[0].shape[0] != rows || of[1].len != rows * (Py_ssize_t)sizeof(double) ||
        of[2].len != rows || of[3].len != rows) {
        PyErr_SetString(PyExc_ValueError, "into: expected as many rows everywhere");
        release_into(into);
        return -1;
    }
    return 0;
}

static char *row_of(const Py_buffer *array, Py_ssize_t row, Py_ssize_t *bytes) {
    *bytes = array->len / array->shape[0];
    return (char *)array->buf + row * *bytes;
}

/* Puts an observation into its row; 1 if it is not of the shape and the dtype that belong there. */
static int put_observation(PyObject *observation, const Py_buffer *into, Py_ssize_t row) {
    Py_ssize_t bytes;
    char *to = row_of(into, row, &bytes);
    if (PyLong_CheckExact(observation)) {
        long long number = PyLong_AsLongLong(observation);
        if (number == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 1;
        }
        if (into->ndim != 1 || bytes != sizeof number || (strcmp(into->format, "l") && strcmp(into->format, "q")))
            return 1;
        memcpy(to, &number, sizeof number);
        return 0;
    }
    Py_buffer from;
    if (Py_TYPE(observation) != (PyTypeObject *)numpy_array && PyObject_IsInstance(observation, numpy_scalar) <= 0) {
        PyErr_Clear();
        return 1; /* what else has a buffer, bytes say, numpy may see with other eyes */
    }
    if (PyObject_GetBuffer(observation, &from, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 1;
    }
    int odd = from.ndim != into->ndim - 1 || from.format == NULL;
    for (int i = 0; !odd && i < from.ndim; i++)
        odd = from.shape[i] != into->shape[i + 1];
    if (!odd && from.len == bytes && strcmp(from.format, into->format) == 0)
        memcpy(to, from.buf, (size_t)bytes);
    else
        odd = 1;
    PyBuffer_Release(&from);
    return odd;
}

/* 0 or 1; -1 if it is no bool, Python's or numpy's. */
static int flag_of(PyObject *object) {
    if (object == Py_False || object == Py_True)
        return object == Py_True;
    return Py_TYPE(object) == (PyTypeObject *)numpy_bool ? PyObject_IsTrue(object) : -1;
}

/* 0; -1 if it is no real number, Python's or numpy's. */
static int number_of(PyObject *object, double *number) {
    if (!PyFloat_Check(object) && !PyLong_Check(object)) {
        if (PyObject_IsInstance(object, numpy_floating) <= 0 && PyObject_IsInstance(object, numpy_integer) <= 0) {
            PyErr_Clear();
            return -1;
        }
    }
    *number = PyFloat_AsDouble(object);
    if (*number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return -1;
    }
    return 0;
}

static int note_info(PyObject *info, Py_ssize_t row, PyObject *infos) {
    if (!PyDict_GET_SIZE(info))
        return 0;
    PyObject *pair = Py_BuildValue("(nO)", row, info);
    int failed = pair == NULL ? -1 : PyList_Append(infos, pair);
    Py_XDECREF(pair);
    return failed;
}

/* What becomes of an outcome: it is put down; it is for Python; so are probably all; an exception. */
enum { DONE = 0, APART = 1, ODD = 2, RAISED = -1 };

static int put_down(PyObject *observation, double reward, int terminated, int truncated, PyObject *info, Py_ssize_t row,
                    PyObject *infos, Into *into) {
    if (!PyDict_CheckExact(info))
        return ODD;
    if (put_observation(observation, &into->arrays[0], row))
        return ODD;
    if (note_info(info, row, infos) < 0)
        return RAISED;
    ((double *)into->arrays[1].buf)[row] = reward;
    ((char *)into->arrays[2].buf)[row] = (char)terminated;
    ((char *)into->arrays[3].buf)[row] = (char)truncated;
    return PyList_SetItem(into->last, row, Py_NewRef(observation)) < 0 ? RAISED : DONE;
}

static int put_step(PyObject *outcome, Py_ssize_t row, long at_end, PyObject *due, PyObject *infos, Into *into) {
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 5)
        return APART;
    int terminated = flag_of(PyTuple_GET_ITEM(outcome, 2)), truncated = flag_of(PyTuple_GET_ITEM(outcome, 3));
    double reward;
    if (terminated < 0 || truncated < 0 || number_of(PyTuple_GET_ITEM(outcome, 1), &reward) < 0)
        return ODD;
    int ends = terminated || truncated;
    if (ends && at_end < 0)
        return APART;
    int put = put_down(PyTuple_GET_ITEM(outcome, 0), reward, terminated, truncated, PyTuple_GET_ITEM(outcome, 4), row,
                       infos, into);
    if (put == DONE && ends && PyList_SetItem(due, row, PyLong_FromLong(at_end)) < 0)
        return RAISED;
    return put;
}

static int put_reset(PyObject *outcome, Py_ssize_t row, PyObject *due, PyObject *infos, Into *into) {
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 2)
        return APART;
    int put = put_down(PyTuple_GET_ITEM(outcome, 0), 0, 0, 0, PyTuple_GET_ITEM(outcome, 1), row, infos, into);
    if (put == DONE && PyList_SetItem(due, row, PyLong_FromLong(0)) < 0)
        return RAISED;
    return put;
}

/* The exception that is set, as an object. */
static PyObject *caught(void) {
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

static PyObject *step_rows(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 10 || !PyList_Check(args[1]) || !PyList_Check(args[2]) || !PyList_Check(args[3]) ||
        !PyList_Check(args[4]) || !PyDict_Check(args[5]) || !PyList_Check(args[8])) {
        PyErr_SetString(PyExc_TypeError, "step_rows: expected 10 arguments, lists and a dict among them");
        return NULL;
    }
    PyObject *actions = args[1], *steps = args[2], *resets = args[3], *due = args[4], *seeds = args[5];
    PyObject *infos = args[8];
    Py_ssize_t row = PyLong_AsSsize_t(args[0]);
    long at_end = PyLong_AsLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    Into into;
    Py_buffer mark;
    if (take_into(args[9], &into) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[7], &mark, PyBUF_WRITABLE) < 0) {
        release_into(&into);
        return NULL;
    }
    Py_ssize_t rows = PyList_GET_SIZE(into.last);
    PyObject *outcome = NULL;
    int put = DONE;
    if (row < 0 || mark.len < (Py_ssize_t)sizeof(uint32_t))
        put = RAISED;
    for (; put == DONE && row < rows; row++) {
        /* an env may do anything, to these lists too */
        if (PyList_GET_SIZE(actions) != rows || PyList_GET_SIZE(steps) != rows || PyList_GET_SIZE(resets) != rows ||
            PyList_GET_SIZE(due) != rows || PyList_GET_SIZE(into.last) != rows) {
            put = RAISED;
            break;
        }
        long next = PyLong_AsLong(PyList_GET_ITEM(due, row));
        if (next != 0 && (next != 1 || PyDict_GET_SIZE(seeds))) {
            put = APART;
            break;
        }
        *(volatile uint32_t *)mark.buf = (uint32_t)(row + 1);
        PyObject *callee = Py_NewRef(PyList_GET_ITEM(next ? resets : steps, row));
        if (next) {
            outcome = PyObject_CallNoArgs(callee);
        } else {
            PyObject *action = Py_NewRef(PyList_GET_ITEM(actions, row));
            outcome = PyObject_CallOneArg(callee, action);
            Py_DECREF(action);
        }
        Py_DECREF(callee);
        if (outcome == NULL) {
            outcome = caught();
            put = APART;
            break;
        }
        if (PyList_GET_SIZE(due) != rows || PyList_GET_SIZE(into.last) != rows)
            put = RAISED;
        else
            put = next ? put_reset(outcome, row, due, infos, &into) : put_step(outcome, row, at_end, due, infos, &into);
        if (put != DONE)
            break;
        Py_CLEAR(outcome);
    }
    PyBuffer_Release(&mark);
    release_into(&into);
    if (put == RAISED) {
        Py_XDECREF(outcome);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "step_rows: expected one of everything a row");
        return NULL;
    }
    return Py_BuildValue("(nNO)", row, outcome == NULL ? Py_NewRef(Py_NotImplemented) : outcome,
                         put == ODD ? Py_True : Py_False);
}

/* ------------------------------------------------------------ express: see engine/dispatch.py and workers/channel.py */

/* References to what was looked at. What could not be got is NULL, with an exception, and so is what is asked of that. */
typedef struct {
    int count;
    PyObject *objects[24];
} Held;

static PyObject *get(Held *held, PyObject *of, PyObject *name) {
    PyObject *value = of == NULL ? NULL : PyObject_GetAttr(of, name);
    if (value != NULL)
        held->objects[held->count++] = value;
    return value;
}

static void let_go(Held *held) {
    while (held->count)
        Py_DECREF(held->objects[--held->count]);
}

static int set_word(PyObject *of, PyObject *name, uint32_t number) {
    PyObject *value = PyLong_FromUnsignedLong(number);
    int failed = value == NULL ? -1 : PyObject_SetAttr(of, name, value);
    Py_XDECREF(value);
    return failed;
}

/* Where a part's request goes, and what awaits the reply. */
typedef struct {
    PyObject *channel, *encoder, *requests, *pending, *express, *request;
    uint32_t chain, number, generation;
    int fd;
} Line;

/* 1 if a request may be written there now, 0 if not, -1: exception. */
static int find_line(Held *held, PyObject *part, Line *line) {
    line->express = get(held, part, str_express);
    line->channel = get(held, get(held, get(held, part, str_member), str_worker), str_express);
    if (line->express == Py_None || line->channel == Py_None)
        return 0;
    PyObject *fd = get(held, line->channel, str_fd), *unsent = get(held, line->channel, str_unsent);
    line->encoder = get(held, line->channel, str_encoder);
    line->requests = get(held, line->channel, str_requests);
    PyObject *chain = get(held, line->encoder, str_chain), *abandoned = get(held, line->requests, str_abandoned);
    PyObject *generation = get(held, line->requests, str_generation);
    line->request = get(held, line->requests, str_next);
    line->pending = get(held, line->requests, str_pending);
    if (PyErr_Occurred())
        return -1;
    line->fd = (int)PyLong_AsLong(fd);
    if (line->fd == -1 && PyErr_Occurred())
        return -1;
    return line->fd >= 0 && abandoned == Py_False && PyList_CheckExact(unsent) && !PyList_GET_SIZE(unsent) &&
           PyDict_CheckExact(line->pending) && !as_word(chain, &line->chain) && !as_word(line->request, &line->number) &&
           !as_word(generation, &line->generation);
}

/* What of these buffers, `pieces` after a header, was not written goes to the channel, which sends it later. */
static int keep_rest(const Line *line, const uint8_t *head, PyObject *pieces, Py_ssize_t written) {
    PyObject *first = PyBytes_FromStringAndSize((const char *)head, HEADER_BYTES);
    if (first == NULL)
        return -1;
    PyList_SET_ITEM(pieces, 0, first);
    PyObject *count = PyLong_FromSsize_t(written), *arguments[] = {line->channel, pieces, count};
    PyObject *done = count == NULL ? NULL : PyObject_VectorcallMethod(str_keep, arguments, 3, NULL);
    Py_XDECREF(count);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Writes a step; 1 if that was done, 0 if nothing was, -1: exception. */
static int write_step(const Line *line, PyObject *part, PyObject *views, PyObject *cuts) {
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    uint32_t body = 0, chain = line->chain;
    Py_ssize_t size = 0, arrays = PyList_GET_SIZE(views);
    int done = -1;
    PyObject *pieces = PyList_New(arrays + 1); /* the first place is the header's */
    if (pieces == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < arrays; i++) {
        PyObject *piece = PyObject_GetItem(PyList_GET_ITEM(views, i), PyList_GET_ITEM(cuts, i));
        if (piece == NULL)
            goto done;
        PyList_SET_ITEM(pieces, i + 1, piece);
        if (add_buffer(&buffers, piece, PyBUF_SIMPLE) < 0)
            goto done;
        Py_ssize_t bytes = buffers.views[i].len;
        size += bytes;
        if (bytes && crc_of(piece, &body) < 0)
            goto done;
    }
    put_head(head, KIND_STEP, line->number, line->generation, size, 0, body);
    if (size > MAX_FIXED || chain_on(head, &chain) < 0) {
        done = PyErr_Occurred() ? -1 : 0;
        goto done;
    }
    put_word(head + OWN_CRC, chain);
    memmove(buffers.parts + 1, buffers.parts, (size_t)buffers.count * sizeof *buffers.parts);
    buffers.parts[0] = (struct iovec){head, HEADER_BYTES};
    /* it does not wait, and who gives the GIL away may get it back much later */
    ssize_t written = writev(line->fd, buffers.parts, buffers.count + 1);
    if (written < 0) { /* Python tries again, and finds out why */
        done = 0;
        goto done;
    }
    if (PyDict_SetItem(line->pending, line->request, line->express) < 0 ||
        set_word(line->requests, str_next, line->number + 1) < 0 || set_word(line->encoder, str_chain, chain) < 0 ||
        PyObject_SetAttr(part, str_request, line->request) < 0)
        goto done;
    done = written == HEADER_BYTES + size || keep_rest(line, head, pieces, written) == 0 ? 1 : -1;
done:
    release_buffers(&buffers);
    Py_DECREF(pieces);
    return done;
}

static PyObject *send_express(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 3 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[2]) || PyList_GET_SIZE(args[1]) > MAX_BUFFERS - 1) {
        PyErr_SetString(PyExc_TypeError, "send_express: expected lists of parts, of views, and of cuts");
        return NULL;
    }
    PyObject *parts = args[0], *views = args[1];
    Py_ssize_t sent = 0;
    int done = 1;
    for (; done == 1 && sent < PyList_GET_SIZE(parts) && sent < PyList_GET_SIZE(args[2]); sent += done == 1) {
        PyObject *part = PyList_GET_ITEM(parts, sent), *cuts = PyList_GET_ITEM(args[2], sent);
        if (!PyList_Check(cuts) || PyList_GET_SIZE(cuts) != PyList_GET_SIZE(views)) {
            PyErr_SetString(PyExc_TypeError, "send_express: expected a cut for each view");
            return NULL;
        }
        Held held = {.count = 0};
        Line line;
        done = find_line(&held, part, &line);
        if (done == 1)
            done = write_step(&line, part, views, cuts);
        let_go(&held);
    }
    return done < 0 ? NULL : PyLong_FromSsize_t(sent);
}

/* Count a reply; 1 if that was done. */
static int count_reply(Held *held, PyObject *part, PyObject *whole, PyObject *pending, PyObject *request) {
    long open = PyLong_AsLong(get(held, whole, str_open));
    if (PyErr_Occurred() || PyDict_DelItem(pending, request) < 0 || PyObject_SetAttr(part, str_arrived, Py_True) < 0 ||
        set_word(whole, str_open, (uint32_t)(open - 1)) < 0)
        return -1;
    if (open > 1)
        return 1;
    PyObject *future = get(held, whole, str_done), *arguments[] = {future, Py_None};
    PyObject *over = future == NULL ? NULL : PyObject_CallMethodNoArgs(future, str_done);
    int is_over = over == NULL ? -1 : PyObject_IsTrue(over);
    Py_XDECREF(over);
    if (is_over)
        return is_over;
    PyObject *set = PyObject_VectorcallMethod(str_set_result, arguments, 2, NULL);
    Py_XDECREF(set);
    return set == NULL ? -1 : 1;
}

/* The reply that comes next: the request and what awaits it; NULL if it is not to be counted, or with an exception. */
static PyObject *next_reply(Held *held, PyObject *pending, PyObject **request, PyObject **part, PyObject **whole) {
    Py_ssize_t place = 0;
    PyObject *value;
    if (!PyDict_CheckExact(pending) || !PyDict_Next(pending, &place, request, &value))
        return NULL;
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3)
        return NULL;
    PyObject *into = PyTuple_GET_ITEM(value, 0), *count = PyTuple_GET_ITEM(value, 2);
    if (!PyList_CheckExact(into) || !PyTuple_CheckExact(count) || PyTuple_GET_SIZE(count) != 2)
        return NULL;
    held->objects[held->count++] = Py_NewRef(*request);
    held->objects[held->count++] = Py_NewRef(value);
    *part = PyTuple_GET_ITEM(count, 0);
    *whole = PyTuple_GET_ITEM(count, 1);
    return get(held, *whole, str_waiting) == Py_True ? into : NULL;
}

static PyObject *take_express(PyObject *module, PyObject *channel) {
    Held held = {.count = 0};
    Buffers buffers = {.count = 0};
    PyObject *result = NULL, *request, *part, *whole;
    PyObject *decoder = get(&held, channel, str_decoder), *requests = get(&held, channel, str_requests);
    PyObject *error = get(&held, decoder, str_error), *header = get(&held, decoder, str__header);
    PyObject *wanted = get(&held, decoder, str__wanted), *frames = get(&held, decoder, str_frames);
    PyObject *head = get(&held, decoder, str__head), *spill = get(&held, decoder, str__spill);
    PyObject *pending = get(&held, requests, str_pending), *before = get(&held, decoder, str_chain);
    PyObject *life = get(&held, requests, str_generation);
    uint32_t chain, generation;
    if (PyErr_Occurred())
        goto done;
    if (error != Py_None || header != Py_None || !PyList_CheckExact(wanted) || PyList_GET_SIZE(wanted) != 1 ||
        PyList_GET_ITEM(wanted, 0) != head || as_word(before, &chain) || as_word(life, &generation) ||
        PyObject_Size(frames)) {
        result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    PyObject *into = next_reply(&held, pending, &request, &part, &whole);
    if (into == NULL || PyList_GET_SIZE(into) > MAX_BUFFERS - 2) {
        result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    int fd = (int)PyLong_AsLong(get(&held, channel, str_fd));
    if (PyErr_Occurred() || add_buffer(&buffers, head, PyBUF_WRITABLE) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(into); i++)
        if (add_buffer(&buffers, PyList_GET_ITEM(into, i), PyBUF_WRITABLE) < 0)
            goto done;
    if (add_buffer(&buffers, spill, PyBUF_WRITABLE) < 0)
        goto done;
    ssize_t count = readv(fd, buffers.parts, buffers.count); /* which does not wait */
    if (count < 0) { /* Python tries again, and finds out why */
        result = errno == EAGAIN || errno == EWOULDBLOCK ? PyLong_FromLong(-1) : Py_NewRef(Py_None);
        goto done;
    }
    int usual = count >= HEADER_BYTES ? is_whole(count, chain, &buffers) : 0;
    const uint8_t *got = buffers.views[0].buf;
    uint32_t asked;
    if (usual == 1 && (got[3] != KIND_RESULT || as_word(request, &asked) || word_at(got + 4) != asked ||
                       word_at(got + 8) != generation))
        usual = 0;
    if (usual == 1) {
        usual = set_word(decoder, str_chain, word_at(got + OWN_CRC));
        if (usual == 0)
            usual = count_reply(&held, part, whole, pending, request);
    }
    result = usual < 0 ? NULL : PyLong_FromSsize_t(usual ? -1 : count);
done:
    release_buffers(&buffers);
    let_go(&held);
    return result;
}

/* ------------------------------------------------------------ the module */

static PyMethodDef methods[] = {
    {"write_frame", (PyCFunction)(void (*)(void))write_frame, METH_FASTCALL, NULL},
    {"read_frame", (PyCFunction)(void (*)(void))read_frame, METH_FASTCALL, NULL},
    {"send_express", (PyCFunction)(void (*)(void))send_express, METH_FASTCALL, NULL},
    {"take_express", take_express, METH_O, NULL},
    {"spin", (PyCFunction)(void (*)(void))spin, METH_FASTCALL, NULL},
    {"step_rows", (PyCFunction)(void (*)(void))step_rows, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *attribute_of(const char *module, const char *name) {
    PyObject *imported = PyImport_ImportModule(module);
    if (imported == NULL)
        return NULL;
    PyObject *value = PyObject_GetAttrString(imported, name);
    Py_DECREF(imported);
    return value;
}

static int set_up(PyObject *module) {
#define INTERN(name)                                                                                                   \
    if (str_##name == NULL && (str_##name = PyUnicode_InternFromString(#name)) == NULL)                                \
        return -1;
    NAMES(INTERN)
    Py_XSETREF(zlib_crc32, attribute_of("zlib", "crc32"));
    Py_XSETREF(numpy_array, attribute_of("numpy", "ndarray"));
    Py_XSETREF(numpy_scalar, attribute_of("numpy", "generic"));
    Py_XSETREF(numpy_bool, attribute_of("numpy", "bool_"));
    Py_XSETREF(numpy_integer, attribute_of("numpy", "integer"));
    Py_XSETREF(numpy_floating, attribute_of("numpy", "floating"));
    return zlib_crc32 && numpy_array && numpy_scalar && numpy_bool && numpy_integer && numpy_floating ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "aioenv._speedups",
    .m_doc = "The path of a plain step in C (see _speedups.pyi).",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__speedups(void) { return PyModuleDef_Init(&definition); }
