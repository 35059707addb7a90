/* The parent's fast path: send plain steps and process replies. See core/dispatcher.py and process/channel.py. */

#include "c.h"

/* The channel that a worker request is sent over, and the `FastReply` that processes its reply. */
typedef struct {
    PyObject *channel, *encoder, *requests, *pending, *fast_reply, *request;
    uint32_t chain, request_id, generation;
    int fd;
} Connection;

/* Return 1 if a request may be written now, 0 if not, -1: exception. */
static int find_connection(References *refs, PyObject *part, Connection *connection) {
    connection->fast_reply = look_up(refs, part, str_fast_reply);
    connection->channel = look_up(refs, look_up(refs, look_up(refs, part, str_member), str_worker), str_fast_channel);
    if (PyErr_Occurred())
        return -1;
    if (connection->fast_reply == Py_None || connection->channel == Py_None)
        return 0;
    PyObject *fd = look_up(refs, connection->channel, str_fd), *unsent = look_up(refs, connection->channel, str_unsent);
    connection->encoder = look_up(refs, connection->channel, str_encoder);
    connection->requests = look_up(refs, connection->channel, str_requests);
    PyObject *chain = look_up(refs, connection->encoder, str_chain);
    PyObject *abandoned = look_up(refs, connection->requests, str_abandoned);
    PyObject *generation = look_up(refs, connection->requests, str_generation);
    connection->request = look_up(refs, connection->requests, str_next_id);
    connection->pending = look_up(refs, connection->requests, str_pending);
    if (PyErr_Occurred())
        return -1;
    connection->fd = (int)PyLong_AsLong(fd);
    if (connection->fd == -1 && PyErr_Occurred())
        return -1;
    return connection->fd >= 0 && abandoned == Py_False && PyList_CheckExact(unsent) && !PyList_GET_SIZE(unsent) &&
           PyDict_CheckExact(connection->pending) && !as_uint32(chain, &connection->chain) &&
           !as_uint32(connection->request, &connection->request_id) && !as_uint32(generation, &connection->generation);
}

/* Let the channel send the rest of a frame later. `pieces` are its buffers; the first place is for the header. */
static int send_rest_later(const Connection *connection, const uint8_t *head, PyObject *pieces, Py_ssize_t written) {
    PyObject *first = PyBytes_FromStringAndSize((const char *)head, HEADER_BYTES);
    if (first == NULL)
        return -1;
    PyList_SET_ITEM(pieces, 0, first);
    PyObject *count = PyLong_FromSsize_t(written), *arguments[] = {connection->channel, pieces, count};
    PyObject *done = count == NULL ? NULL : PyObject_VectorcallMethod(str_send_later, arguments, 3, NULL);
    Py_XDECREF(count);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Write a step. Return 1 if it was written, at least in part, 0 if nothing was, -1: exception. */
static int write_step(const Connection *connection, PyObject *part, PyObject *views, PyObject *cuts,
                      PyObject *payload) {
    Buffers buffers = {.count = 0};
    uint8_t head[HEADER_BYTES];
    uint32_t body = 0, chain = connection->chain;
    Py_ssize_t size = 0, arrays = PyList_GET_SIZE(views);
    int done = -1;
    PyObject *pieces = PyList_New(arrays + 2); /* the first place is for the header, the last for the payload */
    if (pieces == NULL)
        return -1;
    PyList_SET_ITEM(pieces, arrays + 1, Py_NewRef(payload));
    for (Py_ssize_t i = 0; i <= arrays; i++) {
        if (PyList_GET_SIZE(views) != arrays || PyList_GET_SIZE(cuts) != arrays) {
            PyErr_SetString(PyExc_ValueError, "send_steps: a list changed during the call");
            goto done;
        }
        PyObject *piece = i < arrays ? PyObject_GetItem(PyList_GET_ITEM(views, i), PyList_GET_ITEM(cuts, i)) : payload;
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
    Py_ssize_t payload_bytes = buffers.views[arrays].len;
    if (prepend_header(&buffers, head, KIND_STEP, connection->request_id, connection->generation, size, payload_bytes,
                       body, &chain) < 0)
        goto done;
    /* The write does not block, so the GIL is kept: another thread might hold it for long. */
    ssize_t written = writev(connection->fd, buffers.parts, buffers.count + 1);
    if (written < 0) { /* Python tries again and reports the error */
        done = 0;
        goto done;
    }
    if (PyDict_SetItem(connection->pending, connection->request, connection->fast_reply) < 0 ||
        set_uint32(connection->requests, str_next_id, connection->request_id + 1) < 0 ||
        set_uint32(connection->encoder, str_chain, chain) < 0 ||
        PyObject_SetAttr(part, str_request_id, connection->request) < 0)
        goto done;
    done = written == HEADER_BYTES + size + payload_bytes || send_rest_later(connection, head, pieces, written) == 0
               ? 1
               : -1;
done:
    release_buffers(&buffers);
    Py_DECREF(pieces);
    return done;
}

PyObject *send_steps(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 4 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        !PyList_Check(args[3]) || PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[2]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[3]) || PyList_GET_SIZE(args[1]) > MAX_BUFFERS - 1) {
        PyErr_SetString(PyExc_TypeError, "send_steps: expected lists of parts, views, cuts and payloads");
        return NULL;
    }
    PyObject *parts = args[0], *views = args[1];
    Py_ssize_t sent = 0;
    int done = 1;
    for (; done == 1 && sent < PyList_GET_SIZE(parts); sent += done == 1) {
        /* Looking up an attribute may run Python code, which may change the lists. */
        if (sent >= PyList_GET_SIZE(args[2]) || sent >= PyList_GET_SIZE(args[3])) {
            PyErr_SetString(PyExc_ValueError, "send_steps: a list changed during the call");
            return NULL;
        }
        PyObject *part = PyList_GET_ITEM(parts, sent), *cuts = PyList_GET_ITEM(args[2], sent);
        PyObject *payload = PyList_GET_ITEM(args[3], sent);
        if (!PyList_Check(cuts) || PyList_GET_SIZE(cuts) != PyList_GET_SIZE(views)) {
            PyErr_SetString(PyExc_TypeError, "send_steps: expected a cut for each view");
            return NULL;
        }
        References refs = {.count = 3, .objects = {Py_NewRef(part), Py_NewRef(cuts), Py_NewRef(payload)}};
        Connection connection;
        done = find_connection(&refs, part, &connection);
        if (done == 1)
            done = write_step(&connection, part, views, cuts, payload);
        release_references(&refs);
    }
    return done < 0 ? NULL : PyLong_FromSsize_t(sent);
}

/* The fields of a `process.connection.FastReply`. */
typedef struct {
    PyObject *part, *whole, *read, *always;
} FastReply;

/* Count a reply. Return 1; -1: exception. */
static int count_reply(References *refs, const FastReply *fast_reply) {
    PyObject *part = fast_reply->part, *whole = fast_reply->whole, *number = look_up(refs, whole, str_open);
    long open = number == NULL ? -1 : PyLong_AsLong(number);
    if (PyErr_Occurred() || PyObject_SetAttr(part, str_arrived, Py_True) < 0 ||
        set_uint32(whole, str_open, (uint32_t)(open - 1)) < 0)
        return -1;
    if (open > 1)
        return 1;
    PyObject *future = look_up(refs, whole, str_done), *arguments[] = {future, Py_None};
    PyObject *finished = future == NULL ? NULL : PyObject_CallMethodNoArgs(future, str_done);
    int is_finished = finished == NULL ? -1 : PyObject_IsTrue(finished);
    Py_XDECREF(finished);
    if (is_finished)
        return is_finished;
    PyObject *set = PyObject_VectorcallMethod(str_set_result, arguments, 2, NULL);
    Py_XDECREF(set);
    return set == NULL ? -1 : 1;
}

/* Pass the payload of a reply to `read`. Return 1 if the reply is held back, 0 if it counts, -1: exception. */
static int read_payload(PyObject *read, const uint8_t *payload, Py_ssize_t size) {
    PyObject *bytes = PyByteArray_FromStringAndSize((const char *)payload, size);
    PyObject *view = bytes == NULL ? NULL : PyMemoryView_FromObject(bytes);
    PyObject *done = view == NULL ? NULL : PyObject_CallOneArg(read, view);
    int held_back = done == NULL ? -1 : done == Py_True;
    Py_XDECREF(bytes);
    Py_XDECREF(view);
    Py_XDECREF(done);
    return held_back;
}

/* A reply that C may process: the request's id, the list of buffers for its arrays (or NULL), and its `FastReply`. */
typedef struct {
    PyObject *request, *into;
    FastReply fast_reply;
} ExpectedReply;

/* Return the next reply. Its `into` is NULL if C may not process it, or with an exception. */
static ExpectedReply next_reply(References *refs, PyObject *pending) {
    ExpectedReply none = {.into = NULL}, expected;
    Py_ssize_t place = 0;
    PyObject *value;
    if (!PyDict_CheckExact(pending) || !PyDict_Next(pending, &place, &expected.request, &value))
        return none;
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != PENDING_FIELDS)
        return none;
    PyObject *fields = PyTuple_GET_ITEM(value, PENDING_FAST_PATH);
    expected.into = PyTuple_GET_ITEM(value, PENDING_INTO);
    if (!PyList_CheckExact(expected.into) || !PyTuple_Check(fields) || PyTuple_GET_SIZE(fields) != FAST_REPLY_FIELDS)
        return none;
    if (!add_reference(refs, Py_NewRef(expected.request)) || !add_reference(refs, Py_NewRef(value)))
        return none;
    expected.fast_reply =
        (FastReply){PyTuple_GET_ITEM(fields, FAST_REPLY_PART), PyTuple_GET_ITEM(fields, FAST_REPLY_WHOLE),
                    PyTuple_GET_ITEM(fields, FAST_REPLY_READ), PyTuple_GET_ITEM(fields, FAST_REPLY_ALWAYS)};
    PyObject *whole = expected.fast_reply.whole;
    return whole == Py_None || look_up(refs, whole, str_waiting) == Py_True ? expected : none;
}

/* Return whether a header is of a RESULT that answers this request. */
static int is_result_for(const uint8_t *head, PyObject *request, uint32_t generation) {
    uint32_t expected_id;
    return head[AT_KIND] == KIND_RESULT && !as_uint32(request, &expected_id) &&
           read_uint32(head + AT_REQUEST) == expected_id && read_uint32(head + AT_GENERATION) == generation;
}

/* Process a checked reply whose arrays are in place. Return 1; -1: exception. */
static int process_reply(References *refs, PyObject *decoder, PyObject *pending, const ExpectedReply *expected,
                         const uint8_t *head, const uint8_t *payload) {
    Py_ssize_t size = read_uint32(head + AT_PAYLOAD);
    if (set_uint32(decoder, str_chain, read_uint32(head + AT_CRC)) < 0)
        return -1;
    int held_back = 0;
    if (expected->fast_reply.always == Py_True || size)
        held_back = read_payload(expected->fast_reply.read, payload, size);
    if (held_back < 0 || PyDict_DelItem(pending, expected->request) < 0)
        return -1;
    return held_back || expected->fast_reply.whole == Py_None ? 1 : count_reply(refs, &expected->fast_reply);
}

/* Process the next reply out of bytes that came in the same read as another one. Return its size, or 0 if it is not
 * whole or C may not process it; -1: exception. */
static Py_ssize_t process_next(PyObject *decoder, PyObject *requests, uint32_t generation, const uint8_t *from,
                               Py_ssize_t count) {
    References refs = {.count = 0};
    Buffers into = {.count = 0};
    Py_ssize_t taken = 0, size = 0;
    PyObject *pending = look_up(&refs, requests, str_pending); /* reading the previous payload may have replaced it */
    ExpectedReply expected = pending == NULL ? (ExpectedReply){.into = NULL} : next_reply(&refs, pending);
    PyObject *before = expected.into == NULL ? NULL : look_up(&refs, decoder, str_chain);
    uint32_t chain;
    if (before == NULL || as_uint32(before, &chain) || count < HEADER_BYTES ||
        !is_result_for(from, expected.request, generation) || PyList_GET_SIZE(expected.into) > MAX_BUFFERS)
        goto done;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(expected.into); i++) {
        if (add_buffer(&into, PyList_GET_ITEM(expected.into, i), PyBUF_WRITABLE) < 0)
            goto done;
        size += into.views[i].len;
    }
    const uint8_t *body = from + HEADER_BYTES;
    Py_ssize_t whole = HEADER_BYTES + size + read_uint32(from + AT_PAYLOAD);
    if (read_uint32(from + AT_FIXED) != (size_t)size || whole > count)
        goto done;
    int plain = contiguous_crcs_match(chain, from, body, whole - HEADER_BYTES);
    if (plain == 1) { /* only a checked reply is copied into the user's arrays */
        for (int i = 0; i < into.count; body += into.views[i++].len)
            memcpy(into.views[i].buf, body, (size_t)into.views[i].len);
        if (process_reply(&refs, decoder, pending, &expected, from, body) == 1)
            taken = whole;
    }
done:
    release_buffers(&into);
    release_references(&refs);
    return PyErr_Occurred() ? -1 : taken;
}

/* Process all replies that came in the same read as the first, and feed the decoder with the bytes after them.
 * Return -1 if there are none, -2 if there are; NULL: exception. */
static PyObject *process_rest(PyObject *decoder, PyObject *requests, uint32_t generation, const uint8_t *from,
                              Py_ssize_t count) {
    for (Py_ssize_t taken; count; from += taken, count -= taken) {
        taken = process_next(decoder, requests, generation, from, count);
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

PyObject *take_replies(PyObject *module, PyObject *channel) {
    References refs = {.count = 0};
    Buffers buffers = {.count = 0};
    PyObject *result = NULL;
    PyObject *decoder = look_up(&refs, channel, str_decoder), *requests = look_up(&refs, channel, str_requests);
    PyObject *pending = look_up(&refs, requests, str_pending);
    PyObject *generation_number = look_up(&refs, requests, str_generation);
    PyObject *descriptor = look_up(&refs, channel, str_fd);
    int fd = descriptor == NULL ? -1 : (int)PyLong_AsLong(descriptor);
    uint32_t chain, generation;
    if (PyErr_Occurred())
        goto done;
    ExpectedReply expected = next_reply(&refs, pending);
    int plain = expected.into == NULL || as_uint32(generation_number, &generation)
                    ? 0
                    : prepare_read(&refs, decoder, expected.into, &buffers, &chain);
    if (plain != 1) {
        result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    CheckedBytes checked;
    ssize_t count = read_in_pieces(fd, &buffers, &checked);
    if (count == -2)
        goto done;
    if (count < 0) {
        /* Except for EAGAIN, Python tries again and reports the error. */
        result = errno == EAGAIN || errno == EWOULDBLOCK ? PyLong_FromLong(-1) : Py_NewRef(Py_None);
        goto done;
    }
    Py_ssize_t more; /* bytes after the frame */
    const uint8_t *head = buffers.views[0].buf, *spill = buffers.views[buffers.count - 1].buf;
    plain = starts_with_frame(count, chain, &buffers, &checked, &more);
    if (plain == 1 && !is_result_for(head, expected.request, generation))
        plain = 0;
    if (plain == 1)
        plain = process_reply(&refs, decoder, pending, &expected, head, spill);
    if (plain == 1)
        result = process_rest(decoder, requests, generation, spill + read_uint32(head + AT_PAYLOAD), more);
    else if (plain == 0)
        result = PyLong_FromSsize_t(count);
done:
    release_buffers(&buffers);
    release_references(&refs);
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
        outside |= numbers[i] - (uint64_t)low >= (uint64_t)count; /* a smaller number wraps around to a huge one */
    PyBuffer_Release(&view);
    return PyBool_FromLong(!outside);
}
