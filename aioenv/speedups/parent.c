/* A plain step on its way through the parent: see engine/dispatch.py and workers/channel.py. */

#include "c.h"

/* Where a part's request goes, and what awaits the reply. */
typedef struct {
    PyObject *channel, *encoder, *requests, *pending, *express, *request;
    uint32_t chain, number, generation;
    int fd;
} Line;

/* 1 if a request may be written there now, 0 if not, -1: exception. */
static int find_line(Held *held, PyObject *part, Line *line) {
    line->express = look_up(held, part, str_express);
    line->channel = look_up(held, look_up(held, look_up(held, part, str_member), str_worker), str_express);
    if (PyErr_Occurred())
        return -1;
    if (line->express == Py_None || line->channel == Py_None)
        return 0;
    PyObject *fd = look_up(held, line->channel, str_fd), *unsent = look_up(held, line->channel, str_unsent);
    line->encoder = look_up(held, line->channel, str_encoder);
    line->requests = look_up(held, line->channel, str_requests);
    PyObject *chain = look_up(held, line->encoder, str_chain);
    PyObject *abandoned = look_up(held, line->requests, str_abandoned);
    PyObject *generation = look_up(held, line->requests, str_generation);
    line->request = look_up(held, line->requests, str_next);
    line->pending = look_up(held, line->requests, str_pending);
    if (PyErr_Occurred())
        return -1;
    line->fd = (int)PyLong_AsLong(fd);
    if (line->fd == -1 && PyErr_Occurred())
        return -1;
    return line->fd >= 0 && abandoned == Py_False && PyList_CheckExact(unsent) && !PyList_GET_SIZE(unsent) &&
           PyDict_CheckExact(line->pending) && !as_word(chain, &line->chain) &&
           !as_word(line->request, &line->number) && !as_word(generation, &line->generation);
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
static int write_step(const Line *line, PyObject *part, PyObject *views, PyObject *cuts, PyObject *tail) {
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    uint32_t body = 0, chain = line->chain;
    Py_ssize_t size = 0, arrays = PyList_GET_SIZE(views);
    int done = -1;
    PyObject *pieces = PyList_New(arrays + 2); /* the first place is the header's, the last the tail's */
    if (pieces == NULL)
        return -1;
    PyList_SET_ITEM(pieces, arrays + 1, Py_NewRef(tail));
    for (Py_ssize_t i = 0; i <= arrays; i++) {
        if (PyList_GET_SIZE(views) != arrays || PyList_GET_SIZE(cuts) != arrays) {
            PyErr_SetString(PyExc_ValueError, "send_express: lists changed meanwhile");
            goto done;
        }
        PyObject *piece = i < arrays ? PyObject_GetItem(PyList_GET_ITEM(views, i), PyList_GET_ITEM(cuts, i)) : tail;
        if (piece == NULL)
            goto done;
        if (i < arrays)
            PyList_SET_ITEM(pieces, i + 1, piece);
        if (add_buffer(&buffers, piece, PyBUF_SIMPLE) < 0)
            goto done;
        Py_ssize_t bytes = buffers.views[i].len;
        size += i < arrays ? bytes : 0;
        if (bytes && crc_of(piece, &body) < 0)
            goto done;
    }
    if (size > MAX_FIXED) {
        done = 0;
        goto done;
    }
    Py_ssize_t rest = buffers.views[arrays].len;
    if (put_head_before(&buffers, head, KIND_STEP, line->number, line->generation, size, rest, body, &chain) < 0)
        goto done;
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
    done = written == HEADER_BYTES + size + rest || keep_rest(line, head, pieces, written) == 0 ? 1 : -1;
done:
    release_buffers(&buffers);
    Py_DECREF(pieces);
    return done;
}

PyObject *send_express(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 4 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        !PyList_Check(args[3]) || PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[2]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[3]) || PyList_GET_SIZE(args[1]) > MAX_BUFFERS - 1) {
        PyErr_SetString(PyExc_TypeError, "send_express: expected lists of parts, of views, of cuts, and of tails");
        return NULL;
    }
    PyObject *parts = args[0], *views = args[1];
    Py_ssize_t sent = 0;
    int done = 1;
    for (; done == 1 && sent < PyList_GET_SIZE(parts); sent += done == 1) {
        if (sent >= PyList_GET_SIZE(args[2]) || sent >= PyList_GET_SIZE(args[3])) { /* an attribute may be a property */
            PyErr_SetString(PyExc_ValueError, "send_express: lists changed meanwhile");
            return NULL;
        }
        PyObject *part = PyList_GET_ITEM(parts, sent), *cuts = PyList_GET_ITEM(args[2], sent);
        PyObject *tail = PyList_GET_ITEM(args[3], sent);
        if (!PyList_Check(cuts) || PyList_GET_SIZE(cuts) != PyList_GET_SIZE(views)) {
            PyErr_SetString(PyExc_TypeError, "send_express: expected a cut for each view");
            return NULL;
        }
        Held held = {.count = 3, .objects = {Py_NewRef(part), Py_NewRef(cuts), Py_NewRef(tail)}};
        Line line;
        done = find_line(&held, part, &line);
        if (done == 1)
            done = write_step(&line, part, views, cuts, tail);
        let_go(&held);
    }
    return done < 0 ? NULL : PyLong_FromSsize_t(sent);
}

/* What a `workers.requests.Pending` says of what is counted. */
typedef struct {
    PyObject *part, *whole, *read, *always;
} Counted;

/* Count a reply; 1 if that was done. */
static int count_reply(Held *held, const Counted *counted, PyObject *pending, PyObject *request) {
    PyObject *part = counted->part, *whole = counted->whole, *number = look_up(held, whole, str_open);
    long open = number == NULL ? -1 : PyLong_AsLong(number);
    if (PyErr_Occurred() || PyDict_DelItem(pending, request) < 0 || PyObject_SetAttr(part, str_arrived, Py_True) < 0 ||
        set_word(whole, str_open, (uint32_t)(open - 1)) < 0)
        return -1;
    if (open > 1)
        return 1;
    PyObject *future = look_up(held, whole, str_done), *arguments[] = {future, Py_None};
    PyObject *over = future == NULL ? NULL : PyObject_CallMethodNoArgs(future, str_done);
    int is_over = over == NULL ? -1 : PyObject_IsTrue(over);
    Py_XDECREF(over);
    if (is_over)
        return is_over;
    PyObject *set = PyObject_VectorcallMethod(str_set_result, arguments, 2, NULL);
    Py_XDECREF(set);
    return set == NULL ? -1 : 1;
}

/* What a reply has beyond the arrays goes to who reads that. */
static int read_tail(PyObject *read, const Buffers *buffers) {
    PyObject *bytes = PyByteArray_FromStringAndSize(buffers->views[buffers->count - 1].buf, tail_size(buffers));
    PyObject *view = bytes == NULL ? NULL : PyMemoryView_FromObject(bytes);
    PyObject *done = view == NULL ? NULL : PyObject_CallOneArg(read, view);
    Py_XDECREF(bytes);
    Py_XDECREF(view);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The reply that comes next: the request and what awaits it; NULL if it is not to be counted, or with an exception. */
static PyObject *next_reply(Held *held, PyObject *pending, PyObject **request, Counted *counted) {
    Py_ssize_t place = 0;
    PyObject *value;
    if (!PyDict_CheckExact(pending) || !PyDict_Next(pending, &place, request, &value))
        return NULL;
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3)
        return NULL;
    PyObject *into = PyTuple_GET_ITEM(value, 0), *count = PyTuple_GET_ITEM(value, 2);
    if (!PyList_CheckExact(into) || !PyTuple_CheckExact(count) || PyTuple_GET_SIZE(count) != 4)
        return NULL;
    held->objects[held->count++] = Py_NewRef(*request);
    held->objects[held->count++] = Py_NewRef(value);
    *counted = (Counted){PyTuple_GET_ITEM(count, 0), PyTuple_GET_ITEM(count, 1), PyTuple_GET_ITEM(count, 2),
                         PyTuple_GET_ITEM(count, 3)};
    return look_up(held, counted->whole, str_waiting) == Py_True ? into : NULL;
}

PyObject *take_express(PyObject *module, PyObject *channel) {
    Held held = {.count = 0};
    Buffers buffers = {.count = 0};
    PyObject *result = NULL, *request;
    Counted counted;
    PyObject *decoder = look_up(&held, channel, str_decoder), *requests = look_up(&held, channel, str_requests);
    PyObject *pending = look_up(&held, requests, str_pending), *life = look_up(&held, requests, str_generation);
    PyObject *number = look_up(&held, channel, str_fd);
    int fd = number == NULL ? -1 : (int)PyLong_AsLong(number);
    uint32_t chain, generation;
    if (PyErr_Occurred())
        goto done;
    PyObject *into = next_reply(&held, pending, &request, &counted);
    int usual = into == NULL || as_word(life, &generation) ? 0 : offer(&held, decoder, into, &buffers, &chain);
    if (usual != 1) {
        result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    ssize_t count = readv(fd, buffers.parts, buffers.count); /* which does not wait */
    if (count < 0) { /* Python tries again, and finds out why */
        result = errno == EAGAIN || errno == EWOULDBLOCK ? PyLong_FromLong(-1) : Py_NewRef(Py_None);
        goto done;
    }
    usual = is_whole(count, chain, &buffers, UINT32_MAX);
    const uint8_t *head = buffers.views[0].buf;
    uint32_t asked;
    if (usual == 1 && (head[3] != KIND_RESULT || as_word(request, &asked) || word_at(head + 4) != asked ||
                       word_at(head + 8) != generation))
        usual = 0;
    if (usual == 1) {
        usual = set_word(decoder, str_chain, word_at(head + OWN_CRC));
        if (usual == 0 && (counted.always == Py_True || tail_size(&buffers)))
            usual = read_tail(counted.read, &buffers);
        if (usual == 0)
            usual = count_reply(&held, &counted, pending, request);
    }
    result = usual < 0 ? NULL : PyLong_FromSsize_t(usual ? -1 : count);
done:
    release_buffers(&buffers);
    let_go(&held);
    return result;
}
