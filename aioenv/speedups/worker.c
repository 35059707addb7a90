/* A plain step on its way through a worker: see worker/worker_end.py and worker/env_service.py. */

#include "c.h"


/* A request to step rows, whose observations go to a lane of shared memory, if there are several. */
typedef struct {
    uint32_t id, generation;
    Py_ssize_t first, count, lane;
} Request;

static int check_plan(PyObject *plan) {
    if (!PyTuple_Check(plan) || PyTuple_GET_SIZE(plan) != FAST_PATH_FIELDS) {
        PyErr_SetString(PyExc_TypeError, "serve_express: expected a plan of 13 parts");
        return -1;
    }
    const int lists[] = {FAST_PATH_VIEWS, FAST_PATH_STEPS, FAST_PATH_RESETS, FAST_PATH_PENDING,
                         FAST_PATH_INTO,  FAST_PATH_SCHEMAS, FAST_PATH_FIXED};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (!PyList_CheckExact(PyTuple_GET_ITEM(plan, lists[i]))) {
            PyErr_SetString(PyExc_TypeError, "serve_express: expected lists in the plan");
            return -1;
        }
    if (!PyDict_CheckExact(PyTuple_GET_ITEM(plan, FAST_PATH_SEEDS))) {
        PyErr_SetString(PyExc_TypeError, "serve_express: expected a dict of seeds in the plan");
        return -1;
    }
    return 0;
}

/* Whether what was read is a whole request for some of the rows: their actions, which lie where those of the first rows
 * would, after a lane, if there is one, and a tail behind them. -1: exception. */
static int is_run(Py_ssize_t count, uint32_t chain, const Buffers *buffers, Py_ssize_t rows, Request *request) {
    int lanes = buffers->count - 3; /* of buffers before that of the actions */
    if (rows < 1 || count < HEADER_BYTES + RUN_BYTES || lanes < 0 || lanes > 1 || tail_size(buffers) != RUN_BYTES ||
        (lanes && buffers->views[1].len != 1))
        return 0;
    const Py_buffer *head = &buffers->views[0], *actions = &buffers->views[1 + lanes], *spill = actions + 1;
    Py_ssize_t size = (Py_ssize_t)word_at((const uint8_t *)head->buf + AT_FIXED) - lanes, each = actions->len / rows;
    if (!each || actions->len % rows || size < 0 || size % each || size >= actions->len ||
        count != HEADER_BYTES + lanes + size + RUN_BYTES)
        return 0;
    Py_ssize_t here = size + RUN_BYTES < actions->len ? size + RUN_BYTES : actions->len, over = size + RUN_BYTES - here;
    uint8_t tail[RUN_BYTES];
    memcpy(tail, (char *)actions->buf + size, (size_t)(here - size));
    memcpy(tail + (here - size), spill->buf, (size_t)over);
    request->first = word_at(tail + 1);
    request->count = word_at(tail + 5);
    if (tail[0] != RUN_TAG || !request->count || request->count != size / each || request->first + request->count > rows)
        return 0;
    return is_in_order(chain, buffers, lanes + size, tail, RUN_BYTES);
}

/* What came in the same read, behind a request. */
typedef struct {
    char *bytes;
    size_t count;
} Rest;

/* Keeps what has been read into these buffers, so many bytes, from one on. */
static int keep(Rest *rest, const Buffers *buffers, size_t from, size_t count) {
    char *bytes = PyMem_Realloc(rest->bytes, count - from);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    rest->bytes = bytes;
    rest->count = count - from;
    for (int i = 0; i < buffers->count && count; i++) {
        size_t here = buffers->parts[i].iov_len < count ? buffers->parts[i].iov_len : count;
        if (from < here) {
            memcpy(bytes, (char *)buffers->parts[i].iov_base + from, here - from);
            bytes += here - from;
        }
        from -= from < here ? from : here;
        count -= here;
    }
    return 0;
}

/* As if it were read now; there is room, as for the read that brought it. */
static Py_ssize_t read_rest(Rest *rest, const Buffers *buffers) {
    const char *from = rest->bytes;
    size_t left = rest->count;
    for (int i = 0; i < buffers->count && left; i++) {
        size_t here = buffers->parts[i].iov_len < left ? buffers->parts[i].iov_len : left;
        memcpy(buffers->parts[i].iov_base, from, here);
        from += here;
        left -= here;
    }
    rest->count = 0;
    return from - rest->bytes;
}

/* Python goes on with it. */
static int give_back(Rest *rest, PyObject *decoder) {
    if (!rest->count)
        return 0;
    PyObject *bytes = PyBytes_FromStringAndSize(rest->bytes, (Py_ssize_t)rest->count), *arguments[] = {decoder, bytes};
    PyObject *fed = bytes == NULL ? NULL : PyObject_VectorcallMethod(str_feed, arguments, 2, NULL);
    Py_XDECREF(bytes);
    Py_XDECREF(fed);
    rest->count = 0;
    return fed == NULL ? -1 : 0;
}

/* How many of these bytes are of the frame that they begin with. */
static Py_ssize_t length_of(const uint8_t *head, Py_ssize_t count) {
    if (count < HEADER_BYTES)
        return count;
    uint64_t whole = (uint64_t)HEADER_BYTES + word_at(head + AT_FIXED) + word_at(head + AT_PAYLOAD);
    return whole < (uint64_t)count ? (Py_ssize_t)whole : count;
}

/* Reads a request: 1 if it is a plain step; 0 if not, and how many bytes lie in the decoder's buffers; -2 if nothing
 * was read; -1: exception. What came behind a plain step is the rest, and read next. */
static int read_step(int fd, PyObject *decoder, PyObject *plan, Py_ssize_t rows, Py_ssize_t *count, Request *request,
                     Rest *rest) {
    PyObject *views = PyTuple_GET_ITEM(plan, FAST_PATH_VIEWS), *lanes = PyTuple_GET_ITEM(plan, FAST_PATH_INTO);
    Held held = {.count = 0};
    Buffers buffers = {.count = 0};
    uint32_t chain;
    int usual = offer(&held, decoder, views, &buffers, &chain);
    if (usual != 1) {
        usual = usual < 0 ? -1 : -2;
        if (rest->count) {
            PyErr_SetString(PyExc_ValueError, "serve_express: the decoder changed amid a read");
            usual = -1;
        }
        goto done;
    }
    *count = rest->count ? read_rest(rest, &buffers) : readv(fd, buffers.parts, buffers.count); /* there is something */
    if (*count < 0) { /* Python tries again, and finds out why */
        usual = -2;
        goto done;
    }
    const uint8_t *head = buffers.views[0].buf;
    Py_ssize_t its = length_of(head, *count);
    *request = (Request){.count = rows};
    usual = is_whole(its, chain, &buffers);
    if (!usual)
        usual = is_run(its, chain, &buffers, rows, request);
    if (usual == 1 && buffers.count > 3)
        request->lane = *(const uint8_t *)buffers.views[1].buf;
    if (usual == 1 && (head[AT_KIND] != KIND_STEP || request->lane >= PyList_GET_SIZE(lanes)))
        usual = 0;
    if (usual == 1) {
        request->id = word_at(head + AT_REQUEST);
        request->generation = word_at(head + AT_GENERATION);
        if (set_word(decoder, str_chain, word_at(head + AT_CRC)) < 0 ||
            (its < *count && keep(rest, &buffers, (size_t)its, (size_t)*count) < 0))
            usual = -1;
    }
done:
    release_buffers(&buffers);
    let_go(&held);
    return usual;
}

/* Writes all of these, however many writes that takes. */
static int write_all(int fd, struct iovec *parts, int count) {
    while (count) {
        ssize_t written;
        int error;
        Py_BEGIN_ALLOW_THREADS
        written = writev(fd, parts, count);
        error = errno;
        Py_END_ALLOW_THREADS
        if (written < 0 && error != EINTR && error != EAGAIN && error != EWOULDBLOCK) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        if (written < 0 && PyErr_CheckSignals() < 0)
            return -1;
        for (; count && written >= (ssize_t)parts->iov_len; parts++, count--)
            written -= (ssize_t)parts->iov_len;
        if (count && written > 0) {
            parts->iov_base = (char *)parts->iov_base + written;
            parts->iov_len -= (size_t)written;
        }
    }
    return 0;
}

static int write_result(int fd, PyObject *encoder, PyObject *fixed, PyObject *tail, const Request *request) {
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    uint32_t chain, body = 0;
    Py_ssize_t size = 0, parts = PyList_GET_SIZE(fixed);
    int done = -1;
    PyObject *before = PyObject_GetAttr(encoder, str_chain);
    if (before == NULL)
        return -1;
    if (as_word(before, &chain)) {
        PyErr_SetString(PyExc_TypeError, "serve_express: expected the CRC of a header");
        goto done;
    }
    for (Py_ssize_t i = 0; i <= parts; i++) {
        PyObject *part = i < parts ? PyList_GET_ITEM(fixed, i) : tail;
        if (add_buffer(&buffers, part, PyBUF_SIMPLE) < 0)
            goto done;
        const Py_buffer *view = &buffers.views[i];
        size += i < parts ? view->len : 0;
        if (add_to_crc(view->buf, view->len, &body) < 0)
            goto done;
    }
    uint32_t id = request->id, generation = request->generation;
    Py_ssize_t rest = buffers.views[parts].len;
    if (put_head_before(&buffers, head, KIND_RESULT, id, generation, size, rest, body, &chain) == 0 &&
        set_word(encoder, str_chain, chain) == 0)
        done = write_all(fd, buffers.parts, buffers.count + 1);
done:
    release_buffers(&buffers);
    Py_DECREF(before);
    return done;
}

/* The first so many actions, as a list of elements of a copy: envs may keep them, and the next are read into the
 * array. */
static PyObject *listed(PyObject *actions, Py_ssize_t count, int all) {
    PyObject *some = all ? Py_NewRef(actions) : PySequence_GetSlice(actions, 0, count);
    PyObject *copy = some == NULL ? NULL : PyObject_CallMethodNoArgs(some, str_copy);
    PyObject *list = copy == NULL ? NULL : PySequence_List(copy);
    Py_XDECREF(some);
    Py_XDECREF(copy);
    return list;
}

/* What travels of these rows, a list. */
static PyObject *fixed_of(PyObject *plan, const Request *request, int all) {
    if (all)
        return Py_NewRef(PyTuple_GET_ITEM(plan, FAST_PATH_FIXED));
    PyObject *callable = PyTuple_GET_ITEM(plan, FAST_PATH_FIXED_OF);
    PyObject *first = PyLong_FromSsize_t(request->first), *count = PyLong_FromSsize_t(request->count);
    PyObject *arguments[] = {first, count};
    PyObject *fixed = first == NULL || count == NULL ? NULL : PyObject_Vectorcall(callable, arguments, 2, NULL);
    Py_XDECREF(first);
    Py_XDECREF(count);
    if (fixed != NULL && !PyList_CheckExact(fixed)) {
        PyErr_SetString(PyExc_TypeError, "serve_express: expected a list of what travels");
        Py_CLEAR(fixed);
    }
    return fixed;
}

/* Has written what rides on the reply besides, if anything does: 1 if there is no more to tell than that, 0 if there
 * is, -1: exception. */
static int let_ride(PyObject *rides, const Request *request) {
    if (rides == Py_None)
        return 1;
    PyObject *done = PyObject_CallFunction(rides, "nn", request->first, request->count);
    int usual = done == NULL ? -1 : PyObject_IsTrue(done);
    Py_XDECREF(done);
    return usual;
}

static int clear_mark(PyObject *mark) {
    Py_buffer view;
    if (PyObject_GetBuffer(mark, &view, PyBUF_WRITABLE) < 0)
        return -1;
    if (view.len >= (Py_ssize_t)sizeof(uint32_t))
        *(volatile uint32_t *)view.buf = 0;
    PyBuffer_Release(&view);
    return 0;
}

static PyObject *serve(PyObject *const *args, Rest *rest) {
    int read_fd = (int)PyLong_AsLong(args[0]), write_fd = (int)PyLong_AsLong(args[1]);
    double seconds = PyFloat_AsDouble(args[5]);
    PyObject *decoder = args[2], *encoder = args[3], *plan = args[4];
    if (PyErr_Occurred() || check_plan(plan) < 0)
        return NULL;
#define PLAN(part) PyTuple_GET_ITEM(plan, FAST_PATH_##part)
    long at_end = PyLong_AsLong(PLAN(AT_END));
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t rows = PyList_GET_SIZE(PLAN(STEPS));
    for (Py_ssize_t hits = 0;;) {
        Py_ssize_t count = 0;
        Request request;
        int usual = read_step(read_fd, decoder, plan, rows, &count, &request, rest);
        if (usual == -1)
            return NULL;
        if (usual == -2)
            Py_RETURN_NONE;
        if (usual == 0)
            return PyLong_FromSsize_t(count);
        int all = request.count == rows;
        PyObject *into = Py_NewRef(PyList_GET_ITEM(PLAN(INTO), request.lane));
        PyObject *actions = listed(PLAN(ACTIONS), request.count, all), *infos = actions == NULL ? NULL : PyList_New(0);
        if (infos == NULL) {
            Py_DECREF(into);
            Py_XDECREF(actions);
            return NULL;
        }
        Columns columns = {.sorts = PLAN(SCHEMAS), .rows = request.count, .last = -1};
        Stepping stepping = {request.first, actions, PLAN(STEPS), PLAN(RESETS), PLAN(PENDING), PLAN(SEEDS),
                             PLAN(MARK),    infos,   into,        &columns,     at_end};
        Stopped stopped;
        if (step_from(request.first, &stepping, &stopped) < 0) /* an env has taken its worker apart: the step fails */
            stopped = (Stopped){.row = -1, .outcome = caught()};
        Py_DECREF(into);
        int more = stopped.row < request.first + request.count || PyList_GET_SIZE(infos);
        if (!more) { /* no env is stepped any more */
            int all_told = clear_mark(PLAN(MARK)) < 0 ? -1 : let_ride(PLAN(WRITE_EXTRAS), &request);
            if (all_told < 0)
                stopped = (Stopped){.row = -1, .outcome = caught()};
            more = all_told < 1;
        }
        if (more) {
            int lost = columns.sorts != NULL && take_back(&columns, infos) < 0;
            if (lost)
                end_columns(&columns);
            if (lost || give_back(rest, decoder) < 0) {
                Py_XDECREF(stopped.outcome);
                Py_DECREF(actions);
                Py_DECREF(infos);
                return NULL;
            }
            return Py_BuildValue("(kknnnNNnNO)", (unsigned long)request.id, (unsigned long)request.generation,
                                 request.lane, request.first, request.count, actions, infos, stopped.row,
                                 stopped.outcome == NULL ? Py_NewRef(Py_NotImplemented) : stopped.outcome,
                                 stopped.odd ? Py_True : Py_False);
        }
        Py_DECREF(actions);
        Py_DECREF(infos);
        PyObject *tail = tail_of(&columns), *fixed = tail == NULL ? NULL : fixed_of(plan, &request, all);
        end_columns(&columns);
        int failed = fixed == NULL || write_result(write_fd, encoder, fixed, tail, &request) < 0;
        Py_XDECREF(tail);
        Py_XDECREF(fixed);
        if (failed)
            return NULL;
        if (rest->count)
            continue;
        if (seconds <= 0 || !spin_on(read_fd, seconds))
            return PyLong_FromSsize_t(-1 - hits);
        hits++;
    }
}

PyObject *serve_express(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 6) {
        PyErr_SetString(PyExc_TypeError, "serve_express: expected 6 arguments");
        return NULL;
    }
    Rest rest = {NULL, 0};
    PyObject *got = serve(args, &rest);
    PyMem_Free(rest.bytes);
    return got;
}
