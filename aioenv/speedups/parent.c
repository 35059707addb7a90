/* A plain step on its way through the parent: see core/dispatcher.py and process/channel.py. */

#include "c.h"

/* Where a part's request goes, and what awaits the reply. */
typedef struct {
    PyObject *channel, *encoder, *requests, *pending, *express, *request;
    uint32_t chain, number, generation;
    int fd;
} Line;

/* 1 if a request may be written there now, 0 if not, -1: exception. */
static int find_line(Held *held, PyObject *part, Line *line) {
    line->express = look_up(held, part, str_fast_reply);
    line->channel = look_up(held, look_up(held, look_up(held, part, str_member), str_worker), str_fast_channel);
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
    line->request = look_up(held, line->requests, str_next_id);
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
    PyObject *done = count == NULL ? NULL : PyObject_VectorcallMethod(str_send_later, arguments, 3, NULL);
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
        const Py_buffer *view = &buffers.views[i];
        size += i < arrays ? view->len : 0;
        if (add_to_crc(view->buf, view->len, &body) < 0)
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
        set_word(line->requests, str_next_id, line->number + 1) < 0 || set_word(line->encoder, str_chain, chain) < 0 ||
        PyObject_SetAttr(part, str_request_id, line->request) < 0)
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
static int read_tail(PyObject *read, const uint8_t *tail, Py_ssize_t size) {
    PyObject *bytes = PyByteArray_FromStringAndSize((const char *)tail, size);
    PyObject *view = bytes == NULL ? NULL : PyMemoryView_FromObject(bytes);
    PyObject *done = view == NULL ? NULL : PyObject_CallOneArg(read, view);
    Py_XDECREF(bytes);
    Py_XDECREF(view);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* A reply that is to be counted: the request, what awaits it, and where its arrays go; a list, or NULL. */
typedef struct {
    PyObject *request, *into;
    Counted counted;
} Expected;

/* The reply that comes next; its `into` is NULL if it is not to be counted, or with an exception. */
static Expected next_reply(Held *held, PyObject *pending) {
    Expected none = {.into = NULL}, expected;
    Py_ssize_t place = 0;
    PyObject *value;
    if (!PyDict_CheckExact(pending) || !PyDict_Next(pending, &place, &expected.request, &value))
        return none;
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != PENDING_FIELDS)
        return none;
    PyObject *count = PyTuple_GET_ITEM(value, PENDING_FAST_PATH);
    expected.into = PyTuple_GET_ITEM(value, PENDING_INTO);
    if (!PyList_CheckExact(expected.into) || !PyTuple_Check(count) || PyTuple_GET_SIZE(count) != FAST_REPLY_FIELDS)
        return none;
    if (!hold(held, Py_NewRef(expected.request)) || !hold(held, Py_NewRef(value)))
        return none;
    expected.counted = (Counted){PyTuple_GET_ITEM(count, FAST_REPLY_PART), PyTuple_GET_ITEM(count, FAST_REPLY_WHOLE),
                                     PyTuple_GET_ITEM(count, FAST_REPLY_READ), PyTuple_GET_ITEM(count, FAST_REPLY_ALWAYS)};
    return look_up(held, expected.counted.whole, str_waiting) == Py_True ? expected : none;
}

/* Whether this header is of a RESULT that answers that request. */
static int answers(const uint8_t *head, PyObject *request, uint32_t generation) {
    uint32_t asked;
    return head[AT_KIND] == KIND_RESULT && !as_word(request, &asked) && word_at(head + AT_REQUEST) == asked &&
           word_at(head + AT_GENERATION) == generation;
}

/* All that is done with a reply that is in order, whose arrays are where they belong. */
static int take_reply(Held *held, PyObject *decoder, PyObject *pending, const Expected *expected, const uint8_t *head,
                      const uint8_t *tail) {
    Py_ssize_t size = word_at(head + AT_PAYLOAD);
    if (set_word(decoder, str_chain, word_at(head + AT_CRC)) < 0)
        return -1;
    if ((expected->counted.always == Py_True || size) && read_tail(expected->counted.read, tail, size) < 0)
        return -1;
    return count_reply(held, &expected->counted, pending, expected->request);
}

/* What came in the same read, after a reply: the next one, if it is whole and to be counted. How many bytes of it were
 * taken, which is 0 if it is something else; -1: exception. */
static Py_ssize_t take_next(PyObject *decoder, PyObject *requests, uint32_t generation, const uint8_t *from,
                            Py_ssize_t count) {
    Held held = {.count = 0};
    Buffers into = {.count = 0};
    Py_ssize_t taken = 0, size = 0;
    PyObject *pending = look_up(&held, requests, str_pending); /* who read the tail before may have replaced it */
    Expected expected = pending == NULL ? (Expected){.into = NULL} : next_reply(&held, pending);
    PyObject *before = expected.into == NULL ? NULL : look_up(&held, decoder, str_chain);
    uint32_t chain;
    if (before == NULL || as_word(before, &chain) || count < HEADER_BYTES ||
        !answers(from, expected.request, generation) || PyList_GET_SIZE(expected.into) > MAX_BUFFERS)
        goto done;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(expected.into); i++) {
        if (add_buffer(&into, PyList_GET_ITEM(expected.into, i), PyBUF_WRITABLE) < 0)
            goto done;
        size += into.views[i].len;
    }
    const uint8_t *body = from + HEADER_BYTES;
    Py_ssize_t whole = HEADER_BYTES + size + word_at(from + AT_PAYLOAD);
    if (word_at(from + AT_FIXED) != (size_t)size || whole > count)
        goto done;
    int usual = is_sound(chain, from, body, whole - HEADER_BYTES);
    if (usual == 1) { /* nothing is written into anybody's arrays before that */
        for (int i = 0; i < into.count; body += into.views[i++].len)
            memcpy(into.views[i].buf, body, (size_t)into.views[i].len);
        if (take_reply(&held, decoder, pending, &expected, from, body) == 1)
            taken = whole;
    }
done:
    release_buffers(&into);
    let_go(&held);
    return PyErr_Occurred() ? -1 : taken;
}

/* What came in the same read, after a reply: more of them, and what they are followed by, which the decoder is given.
 * -1 if nothing is, -2 if something is; NULL: exception. */
static PyObject *take_rest(PyObject *decoder, PyObject *requests, uint32_t generation, const uint8_t *from,
                           Py_ssize_t count) {
    for (Py_ssize_t taken; count; from += taken, count -= taken) {
        taken = take_next(decoder, requests, generation, from, count);
        if (taken < 0)
            return NULL;
        if (taken)
            continue;
        PyObject *rest = PyBytes_FromStringAndSize((const char *)from, count), *arguments[] = {decoder, rest};
        PyObject *fed = rest == NULL ? NULL : PyObject_VectorcallMethod(str_feed, arguments, 2, NULL);
        Py_XDECREF(rest);
        Py_XDECREF(fed);
        return fed == NULL ? NULL : PyLong_FromLong(-2);
    }
    return PyLong_FromLong(-1);
}

PyObject *take_express(PyObject *module, PyObject *channel) {
    Held held = {.count = 0};
    Buffers buffers = {.count = 0};
    PyObject *result = NULL;
    PyObject *decoder = look_up(&held, channel, str_decoder), *requests = look_up(&held, channel, str_requests);
    PyObject *pending = look_up(&held, requests, str_pending), *life = look_up(&held, requests, str_generation);
    PyObject *number = look_up(&held, channel, str_fd);
    int fd = number == NULL ? -1 : (int)PyLong_AsLong(number);
    uint32_t chain, generation;
    if (PyErr_Occurred())
        goto done;
    Expected expected = next_reply(&held, pending);
    int usual = expected.into == NULL || as_word(life, &generation)
                    ? 0
                    : offer(&held, decoder, expected.into, &buffers, &chain);
    if (usual != 1) {
        result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    ssize_t count = readv(fd, buffers.parts, buffers.count); /* which does not wait */
    if (count < 0) { /* Python tries again, and finds out why */
        result = errno == EAGAIN || errno == EWOULDBLOCK ? PyLong_FromLong(-1) : Py_NewRef(Py_None);
        goto done;
    }
    Py_ssize_t more; /* after it */
    const uint8_t *head = buffers.views[0].buf, *spill = buffers.views[buffers.count - 1].buf;
    usual = begins_whole(count, chain, &buffers, &more);
    if (usual == 1 && !answers(head, expected.request, generation))
        usual = 0;
    if (usual == 1)
        usual = take_reply(&held, decoder, pending, &expected, head, spill);
    if (usual == 1)
        result = take_rest(decoder, requests, generation, spill + word_at(head + AT_PAYLOAD), more);
    else if (usual == 0)
        result = PyLong_FromSsize_t(count);
done:
    release_buffers(&buffers);
    let_go(&held);
    return result;
}

PyObject *within(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 3 || !PyLong_Check(args[1]) || !PyLong_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "within: expected an array and two ints");
        return NULL;
    }
    long long low = PyLong_AsLongLong(args[1]), count = PyLong_AsLongLong(args[2]);
    Py_buffer view;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (view.itemsize != sizeof low || (strcmp(view.format, "l") && strcmp(view.format, "q"))) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_TypeError, "within: expected an array of int64");
        return NULL;
    }
    const uint64_t *numbers = view.buf;
    int outside = 0;
    for (Py_ssize_t i = 0; i < view.len / view.itemsize; i++)
        outside |= numbers[i] - (uint64_t)low >= (uint64_t)count; /* what is below comes out as a huge number */
    PyBuffer_Release(&view);
    return PyBool_FromLong(!outside);
}
