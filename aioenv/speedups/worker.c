/* The worker's fast path: read plain steps, step the envs and reply. See worker/worker_end.py and
 * worker/env_service.py. */

#include "c.h"

/* A request to step rows. The observations go to this shared batch; 0 without shared memory. */
typedef struct {
    uint32_t id, generation;
    Py_ssize_t first, count, shared_batch;
} StepRequest;

static int check_fast_path(PyObject *fast_path) {
    if (!PyTuple_Check(fast_path) || PyTuple_GET_SIZE(fast_path) != FAST_PATH_FIELDS) {
        PyErr_SetString(PyExc_TypeError, "serve_steps: expected a fast path of 13 fields");
        return -1;
    }
    const int lists[] = {FAST_PATH_VIEWS, FAST_PATH_STEPS,   FAST_PATH_RESETS, FAST_PATH_PENDING_RESET,
                         FAST_PATH_INTO,  FAST_PATH_SCHEMAS, FAST_PATH_FIXED};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (!PyList_CheckExact(PyTuple_GET_ITEM(fast_path, lists[i]))) {
            PyErr_SetString(PyExc_TypeError, "serve_steps: expected lists in the fast path");
            return -1;
        }
    if (!PyDict_CheckExact(PyTuple_GET_ITEM(fast_path, FAST_PATH_SEEDS))) {
        PyErr_SetString(PyExc_TypeError, "serve_steps: expected a dict of seeds in the fast path");
        return -1;
    }
    return 0;
}

/* Return whether a read of `count` bytes is one whole request to step some of the rows; -1: exception. The actions
 * lie at the start of the buffer for all actions, after the shared batch's number if there is one. The payload with
 * the range of rows follows them. */
static int is_partial_step(Py_ssize_t count, uint32_t chain, const Buffers *buffers, Py_ssize_t rows,
                           StepRequest *request) {
    int prefix = buffers->count - 3; /* buffers before the actions: 0 or 1 */
    if (rows < 1 || count < HEADER_BYTES + RUN_BYTES || prefix < 0 || prefix > 1 ||
        payload_size(buffers) != RUN_BYTES || (prefix && buffers->views[1].len != 1))
        return 0;
    const Py_buffer *head = &buffers->views[0], *actions = &buffers->views[1 + prefix], *spill = actions + 1;
    Py_ssize_t size = (Py_ssize_t)read_uint32((const uint8_t *)head->buf + AT_FIXED) - prefix;
    Py_ssize_t each = actions->len / rows;
    if (!each || actions->len % rows || size < 0 || size % each || size >= actions->len ||
        count != HEADER_BYTES + prefix + size + RUN_BYTES)
        return 0;
    Py_ssize_t here = size + RUN_BYTES < actions->len ? size + RUN_BYTES : actions->len;
    Py_ssize_t spilled = size + RUN_BYTES - here;
    uint8_t payload[RUN_BYTES];
    memcpy(payload, (char *)actions->buf + size, (size_t)(here - size));
    memcpy(payload + (here - size), spill->buf, (size_t)spilled);
    request->first = read_uint32(payload + 1);
    request->count = read_uint32(payload + 5);
    if (payload[0] != RUN_TAG || !request->count || request->count != size / each ||
        request->first + request->count > rows)
        return 0;
    return crcs_match(chain, buffers, prefix + size, payload, RUN_BYTES);
}

/* Bytes that came in the same read, after a request. */
typedef struct {
    char *bytes;
    size_t count;
} Unread;

/* Keep the bytes that were read into these buffers from offset `from` on, up to `count`. */
static int keep_unread(Unread *unread, const Buffers *buffers, size_t from, size_t count) {
    char *bytes = PyMem_Realloc(unread->bytes, count - from);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    unread->bytes = bytes;
    unread->count = count - from;
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

/* Fill the buffers with the kept bytes, as if they were read now. They fit, as they came in a read of that size. */
static Py_ssize_t replay_unread(Unread *unread, const Buffers *buffers) {
    const char *from = unread->bytes;
    size_t left = unread->count;
    for (int i = 0; i < buffers->count && left; i++) {
        size_t here = buffers->parts[i].iov_len < left ? buffers->parts[i].iov_len : left;
        memcpy(buffers->parts[i].iov_base, from, here);
        from += here;
        left -= here;
    }
    unread->count = 0;
    return from - unread->bytes;
}

/* Feed the decoder with the kept bytes, so that Python goes on with them. */
static int feed_decoder(Unread *unread, PyObject *decoder) {
    if (!unread->count)
        return 0;
    PyObject *bytes = PyBytes_FromStringAndSize(unread->bytes, (Py_ssize_t)unread->count);
    PyObject *arguments[] = {decoder, bytes};
    PyObject *fed = bytes == NULL ? NULL : PyObject_VectorcallMethod(str_feed, arguments, 2, NULL);
    Py_XDECREF(bytes);
    Py_XDECREF(fed);
    unread->count = 0;
    return fed == NULL ? -1 : 0;
}

/* Return how many of these bytes belong to the frame that they start with. */
static Py_ssize_t frame_length(const uint8_t *head, Py_ssize_t count) {
    if (count < HEADER_BYTES)
        return count;
    uint64_t whole = (uint64_t)HEADER_BYTES + read_uint32(head + AT_FIXED) + read_uint32(head + AT_PAYLOAD);
    return whole < (uint64_t)count ? (Py_ssize_t)whole : count;
}

/* Read a request. Return 1 if it is a plain step; 0 if not, with `count` bytes in the decoder's buffers; -2 if
 * nothing was read; -1: exception. Bytes after a plain step are kept and read next. */
static int read_step(int fd, PyObject *decoder, PyObject *fast_path, Py_ssize_t rows, Py_ssize_t *count,
                     StepRequest *request, Unread *unread) {
    PyObject *views = PyTuple_GET_ITEM(fast_path, FAST_PATH_VIEWS);
    PyObject *shared_batches = PyTuple_GET_ITEM(fast_path, FAST_PATH_INTO);
    References refs = {.count = 0};
    Buffers buffers = {.count = 0};
    uint32_t chain;
    int plain = prepare_read(&refs, decoder, views, &buffers, &chain);
    if (plain != 1) {
        plain = plain < 0 ? -1 : -2;
        if (unread->count) {
            PyErr_SetString(PyExc_ValueError, "serve_steps: the decoder changed during a read");
            plain = -1;
        }
        goto done;
    }
    *count = unread->count ? replay_unread(unread, &buffers) : readv(fd, buffers.parts, buffers.count); /* readable */
    if (*count < 0) { /* Python tries again and reports the error */
        plain = -2;
        goto done;
    }
    const uint8_t *head = buffers.views[0].buf;
    Py_ssize_t frame_bytes = frame_length(head, *count);
    *request = (StepRequest){.count = rows};
    plain = is_one_frame(frame_bytes, chain, &buffers);
    if (!plain)
        plain = is_partial_step(frame_bytes, chain, &buffers, rows, request);
    if (plain == 1 && buffers.count > 3)
        request->shared_batch = *(const uint8_t *)buffers.views[1].buf;
    if (plain == 1 && (head[AT_KIND] != KIND_STEP || request->shared_batch >= PyList_GET_SIZE(shared_batches)))
        plain = 0;
    if (plain == 1) {
        request->id = read_uint32(head + AT_REQUEST);
        request->generation = read_uint32(head + AT_GENERATION);
        if (set_uint32(decoder, str_chain, read_uint32(head + AT_CRC)) < 0 ||
            (frame_bytes < *count && keep_unread(unread, &buffers, (size_t)frame_bytes, (size_t)*count) < 0))
            plain = -1;
    }
done:
    release_buffers(&buffers);
    release_references(&refs);
    return plain;
}

/* Write all parts, in as many writes as needed. */
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

static int write_result(int fd, PyObject *encoder, PyObject *fixed, PyObject *payload, const StepRequest *request) {
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    uint32_t chain, body = 0;
    Py_ssize_t size = 0, parts = PyList_GET_SIZE(fixed);
    int done = -1;
    PyObject *before = PyObject_GetAttr(encoder, str_chain);
    if (before == NULL)
        return -1;
    if (as_uint32(before, &chain)) {
        PyErr_SetString(PyExc_TypeError, "serve_steps: expected the CRC of a header");
        goto done;
    }
    for (Py_ssize_t i = 0; i <= parts; i++) {
        PyObject *part = i < parts ? PyList_GET_ITEM(fixed, i) : payload;
        if (add_buffer(&buffers, part, PyBUF_SIMPLE) < 0)
            goto done;
        const Py_buffer *view = &buffers.views[i];
        size += i < parts ? view->len : 0;
        if (add_to_crc(view->buf, view->len, &body) < 0)
            goto done;
    }
    uint32_t id = request->id, generation = request->generation;
    Py_ssize_t payload_bytes = buffers.views[parts].len;
    if (prepend_header(&buffers, head, KIND_RESULT, id, generation, size, payload_bytes, body, &chain) == 0 &&
        set_uint32(encoder, str_chain, chain) == 0)
        done = write_all(fd, buffers.parts, buffers.count + 1);
done:
    release_buffers(&buffers);
    Py_DECREF(before);
    return done;
}

/* Return a new list of `count` actions; `PySequence_List` takes a third of a microsecond longer for an array. */
static PyObject *list_actions(PyObject *actions, Py_ssize_t count) {
    Py_ssize_t given = PySequence_Size(actions);
    if (given >= 0 && given != count)
        PyErr_Format(PyExc_ValueError, "expected %zd actions, one a row, got %zd", count, given);
    PyObject *list = given == count ? PyList_New(count) : NULL;
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *action = PySequence_GetItem(actions, i);
        PyList_SET_ITEM(list, i, action);
        if (action == NULL)
            Py_CLEAR(list);
    }
    return list;
}

/* Return the first `count` actions as a list. It is made of a copy, because envs may keep actions and the next ones
 * are read into the array. */
static PyObject *list_copied_actions(PyObject *actions, Py_ssize_t count, int all) {
    PyObject *some = all ? Py_NewRef(actions) : PySequence_GetSlice(actions, 0, count);
    PyObject *copy = some == NULL ? NULL : PyObject_CallMethodNoArgs(some, str_copy);
    PyObject *list = copy == NULL ? NULL : list_actions(copy, count);
    Py_XDECREF(some);
    Py_XDECREF(copy);
    return list;
}

/* Return the list of arrays that travel for these rows. */
static PyObject *fixed_of(PyObject *fast_path, const StepRequest *request, int all) {
    if (all)
        return Py_NewRef(PyTuple_GET_ITEM(fast_path, FAST_PATH_FIXED));
    PyObject *callable = PyTuple_GET_ITEM(fast_path, FAST_PATH_FIXED_OF);
    PyObject *first = PyLong_FromSsize_t(request->first), *count = PyLong_FromSsize_t(request->count);
    PyObject *arguments[] = {first, count};
    PyObject *fixed = first == NULL || count == NULL ? NULL : PyObject_Vectorcall(callable, arguments, 2, NULL);
    Py_XDECREF(first);
    Py_XDECREF(count);
    if (fixed != NULL && !PyList_CheckExact(fixed)) {
        PyErr_SetString(PyExc_TypeError, "serve_steps: expected a list of arrays");
        Py_CLEAR(fixed);
    }
    return fixed;
}

/* Write the states and checkpoints of these rows, if there are any. Return 1 if that completes the reply, 0 if
 * Python must reply, -1: exception. */
static int write_extras(PyObject *write_callable, const StepRequest *request) {
    if (write_callable == Py_None)
        return 1;
    PyObject *done = PyObject_CallFunction(write_callable, "nn", request->first, request->count);
    int plain = done == NULL ? -1 : PyObject_IsTrue(done);
    Py_XDECREF(done);
    return plain;
}

static int clear_current_row(PyObject *current_row) {
    Py_buffer view;
    if (PyObject_GetBuffer(current_row, &view, PyBUF_WRITABLE) < 0)
        return -1;
    if (view.len >= (Py_ssize_t)sizeof(uint32_t))
        *(volatile uint32_t *)view.buf = 0;
    PyBuffer_Release(&view);
    return 0;
}

/* Step the rows of a request with a list of actions, of which this takes the reference. Return 1 and the payload of the
 * reply; 0 and the fields of a `PartialStep`, if Python must finish the step; -1: exception. */
static int step_request(PyObject *fast_path, const StepRequest *request, PyObject *actions, PyObject **result) {
#define FIELD(part) PyTuple_GET_ITEM(fast_path, FAST_PATH_##part)
    long at_end = PyLong_AsLong(FIELD(AT_END));
    if (PyErr_Occurred()) {
        Py_XDECREF(actions);
        return -1;
    }
    PyObject *outputs = Py_NewRef(PyList_GET_ITEM(FIELD(INTO), request->shared_batch));
    PyObject *infos = actions == NULL ? NULL : PyList_New(0);
    if (infos == NULL) {
        Py_DECREF(outputs);
        Py_XDECREF(actions);
        return -1;
    }
    Columns columns = {.schemas = FIELD(SCHEMAS), .rows = request->count, .last = -1};
    Stepping stepping = {request->first, actions, FIELD(STEPS), FIELD(RESETS), FIELD(PENDING_RESET), FIELD(SEEDS),
                         FIELD(CURRENT_ROW), infos, outputs, &columns, at_end};
    StopPoint stopped;
    if (step_from(request->first, &stepping, &stopped) < 0) /* an env changed the worker's lists: the step fails */
        stopped = (StopPoint){.row = -1, .outcome = take_exception()};
    Py_DECREF(outputs);
    int all_stepped = stopped.row == request->first + request->count;
    int for_python = !all_stepped || PyList_GET_SIZE(infos);
    if (all_stepped) {
        int complete = clear_current_row(FIELD(CURRENT_ROW)) < 0 ? -1 : 0;
        if (complete == 0 && !for_python)
            complete = write_extras(FIELD(WRITE_EXTRAS), request);
        if (complete < 0)
            stopped = (StopPoint){.row = -1, .outcome = take_exception()};
        for_python |= complete < 1;
    }
    if (!for_python) {
        Py_DECREF(actions);
        Py_DECREF(infos);
        *result = columns_payload(&columns);
        free_columns(&columns);
        return *result == NULL ? -1 : 1;
    }
    if (columns.schemas != NULL && restore_infos(&columns, infos) < 0) {
        free_columns(&columns);
        Py_XDECREF(stopped.outcome);
        Py_XDECREF(stopped.last_step);
        Py_DECREF(actions);
        Py_DECREF(infos);
        return -1;
    }
    *result = Py_BuildValue("(kknnnNNnNON)", (unsigned long)request->id, (unsigned long)request->generation,
                            request->shared_batch, request->first, request->count, actions, infos, stopped.row,
                            stopped.outcome == NULL ? Py_NewRef(Py_NotImplemented) : stopped.outcome,
                            stopped.nonstandard ? Py_True : Py_False,
                            stopped.last_step == NULL ? Py_NewRef(Py_None) : stopped.last_step);
    return *result == NULL ? -1 : 0;
}

static PyObject *serve_loop(PyObject *const *args, Unread *unread) {
    int read_fd = (int)PyLong_AsLong(args[0]), write_fd = (int)PyLong_AsLong(args[1]);
    double seconds = PyFloat_AsDouble(args[5]);
    PyObject *decoder = args[2], *encoder = args[3], *fast_path = args[4];
    if (PyErr_Occurred() || check_fast_path(fast_path) < 0)
        return NULL;
    Py_ssize_t rows = PyList_GET_SIZE(FIELD(STEPS));
    for (Py_ssize_t hits = 0;;) {
        Py_ssize_t count = 0;
        StepRequest request;
        int plain = read_step(read_fd, decoder, fast_path, rows, &count, &request, unread);
        if (plain == -1)
            return NULL;
        if (plain == -2)
            Py_RETURN_NONE;
        if (plain == 0)
            return PyLong_FromSsize_t(count);
        PyObject *payload = NULL;
        PyObject *actions = list_copied_actions(FIELD(ACTIONS), request.count, request.count == rows);
        int complete = step_request(fast_path, &request, actions, &payload);
        if (complete < 0)
            return NULL;
        if (!complete) {
            if (feed_decoder(unread, decoder) < 0)
                Py_CLEAR(payload);
            return payload;
        }
        PyObject *fixed = fixed_of(fast_path, &request, request.count == rows);
        int failed = fixed == NULL || write_result(write_fd, encoder, fixed, payload, &request) < 0;
        Py_DECREF(payload);
        Py_XDECREF(fixed);
        if (failed)
            return NULL;
        if (unread->count)
            continue;
        if (seconds <= 0 || !spin_until_readable(read_fd, seconds))
            return PyLong_FromSsize_t(-1 - hits);
        hits++;
    }
}

PyObject *serve_steps(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 6) {
        PyErr_SetString(PyExc_TypeError, "serve_steps: expected 6 arguments");
        return NULL;
    }
    Unread unread = {NULL, 0};
    PyObject *result = serve_loop(args, &unread);
    PyMem_Free(unread.bytes);
    return result;
}

/* Copy the arrays of a reply into these buffers. */
static int copy_result(PyObject *fixed, PyObject *into) {
    if (PyList_GET_SIZE(fixed) != PyList_GET_SIZE(into)) {
        PyErr_SetString(PyExc_ValueError, "step_here: expected as many buffers as arrays");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(fixed); i++) { /* this runs no Python code that changes the lists */
        Py_buffer from, to;
        if (PyObject_GetBuffer(PyList_GET_ITEM(fixed, i), &from, PyBUF_SIMPLE) < 0)
            return -1;
        if (PyObject_GetBuffer(PyList_GET_ITEM(into, i), &to, PyBUF_WRITABLE) < 0) {
            PyBuffer_Release(&from);
            return -1;
        }
        int fits = from.len == to.len;
        if (fits)
            memcpy(to.buf, from.buf, (size_t)from.len);
        PyBuffer_Release(&from);
        PyBuffer_Release(&to);
        if (!fits) {
            PyErr_SetString(PyExc_ValueError, "step_here: a buffer has another size than its array");
            return -1;
        }
    }
    return 0;
}

PyObject *step_here(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 5 || !(args[4] == Py_None || PyList_CheckExact(args[4]))) {
        PyErr_SetString(PyExc_TypeError, "step_here: expected 5 arguments, the last a list or None");
        return NULL;
    }
    PyObject *fast_path = args[0];
    if (check_fast_path(fast_path) < 0)
        return NULL;
    StepRequest request = {.first = PyLong_AsSsize_t(args[1]), .count = PyLong_AsSsize_t(args[2])};
    Py_ssize_t rows = PyList_GET_SIZE(FIELD(STEPS));
    if (PyErr_Occurred())
        return NULL;
    if (request.first < 0 || request.count < 1 || request.count > rows - request.first ||
        !PyList_GET_SIZE(FIELD(INTO))) {
        PyErr_SetString(PyExc_ValueError, "step_here: there are no such rows");
        return NULL;
    }
    PyObject *actions = list_actions(args[3], request.count), *payload = NULL;
    if (actions == NULL)
        return NULL;
    int complete = step_request(fast_path, &request, actions, &payload);
    if (complete < 1 || args[4] == Py_None)
        return complete < 0 ? NULL : payload;
    PyObject *fixed = fixed_of(fast_path, &request, request.count == rows);
    if (fixed == NULL || copy_result(fixed, args[4]) < 0)
        Py_CLEAR(payload);
    Py_XDECREF(fixed);
    return payload;
}
