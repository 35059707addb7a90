/* Step the envs of a worker: see spaces/autoreset.py and worker/row_buffers.py. */

#include "c.h"

enum { MAX_LEAVES = 16 };

/* The arrays that results go to. */
typedef struct {
    PyObject *tree; /* of observations: an array, or dicts and tuples of arrays */
    int leaf_count;
    Py_buffer leaves[MAX_LEAVES]; /* the arrays of the tree, in order */
    int flag_count;
    Py_buffer flags[3]; /* rewards, terminated, truncated */
    PyObject *last;
} Outputs;

static void release_outputs(Outputs *outputs) {
    while (outputs->flag_count)
        PyBuffer_Release(&outputs->flags[--outputs->flag_count]);
    while (outputs->leaf_count)
        PyBuffer_Release(&outputs->leaves[--outputs->leaf_count]);
}

static int get_array(PyObject *array, Py_buffer *view) {
    return PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS);
}

static int get_leaf(PyObject *array, Py_ssize_t rows, Outputs *outputs) {
    Py_buffer *leaf = &outputs->leaves[outputs->leaf_count];
    if (outputs->leaf_count == MAX_LEAVES) {
        PyErr_SetString(PyExc_ValueError, "into: too many arrays");
        return -1;
    }
    if (get_array(array, leaf) < 0)
        return -1;
    outputs->leaf_count++;
    if (leaf->ndim >= 1 && leaf->shape[0] == rows)
        return 0;
    PyErr_SetString(PyExc_ValueError, "into: expected the same number of rows in each array");
    return -1;
}

/* Get the buffers of all arrays of a tree, each of `rows` rows. */
static int get_tree(PyObject *tree, Py_ssize_t rows, Outputs *outputs) {
    int is_dict = PyDict_CheckExact(tree), failed = 0;
    if (!is_dict && !PyTuple_CheckExact(tree))
        return get_leaf(tree, rows, outputs);
    if (Py_EnterRecursiveCall(" in a tree of arrays"))
        return -1;
    PyObject *key, *child;
    for (Py_ssize_t place = 0; is_dict && !failed && PyDict_Next(tree, &place, &key, &child);)
        failed = get_tree(child, rows, outputs);
    for (Py_ssize_t i = 0; !is_dict && !failed && i < PyTuple_GET_SIZE(tree); i++)
        failed = get_tree(PyTuple_GET_ITEM(tree, i), rows, outputs);
    Py_LeaveRecursiveCall();
    return failed;
}

static int get_outputs(PyObject *arrays, Outputs *outputs) {
    outputs->leaf_count = outputs->flag_count = 0;
    if (!PyTuple_Check(arrays) || PyTuple_GET_SIZE(arrays) != 5 || !PyList_Check(PyTuple_GET_ITEM(arrays, 4))) {
        PyErr_SetString(PyExc_TypeError, "into: expected arrays of observations, three more, and a list");
        return -1;
    }
    outputs->tree = PyTuple_GET_ITEM(arrays, 0);
    outputs->last = PyTuple_GET_ITEM(arrays, 4);
    Py_ssize_t rows = PyList_GET_SIZE(outputs->last);
    if (get_tree(outputs->tree, rows, outputs) < 0) {
        release_outputs(outputs);
        return -1;
    }
    for (; outputs->flag_count < 3; outputs->flag_count++)
        if (get_array(PyTuple_GET_ITEM(arrays, 1 + outputs->flag_count), &outputs->flags[outputs->flag_count]) < 0) {
            release_outputs(outputs);
            return -1;
        }
    const Py_buffer *flags = outputs->flags;
    if (flags[0].len != rows * (Py_ssize_t)sizeof(double) || flags[1].len != rows || flags[2].len != rows) {
        PyErr_SetString(PyExc_ValueError, "into: expected the same number of rows in each array");
        release_outputs(outputs);
        return -1;
    }
    return 0;
}

static char *row_address(const Py_buffer *array, Py_ssize_t row, Py_ssize_t *bytes) {
    *bytes = array->len / array->shape[0];
    return (char *)array->buf + row * *bytes;
}

/* The first fields of numpy's arrays. They are part of its ABI: its macros read them in extensions that were compiled
 * for another version. A new array needs 0.3 us for a `Py_buffer`. */
typedef struct {
    PyObject head;
    char *data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
} Array;
enum { C_CONTIGUOUS = 1 };
static int knows_fields;

/* Find out whether an array has these fields. It must be writable, and not C-contiguous. */
int check_array_fields(PyObject *array) {
    Py_buffer view;
    PyObject *dtype = PyObject_GetAttrString(array, "dtype");
    if (dtype == NULL || PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_WRITABLE) < 0) {
        Py_XDECREF(dtype);
        return -1;
    }
    const Array *fields = (const Array *)array;
    knows_fields = fields->data == view.buf && fields->ndim == view.ndim && fields->dtype == dtype;
    knows_fields = knows_fields && !(fields->flags & C_CONTIGUOUS) && PyBuffer_IsContiguous(&view, 'C') == 0;
    for (int i = 0; knows_fields && i < view.ndim; i++)
        knows_fields = fields->shape[i] == view.shape[i] && fields->strides[i] == view.strides[i];
    PyBuffer_Release(&view);
    Py_DECREF(dtype);
    return 0;
}

/* Return whether an observation is an array of this row's dtype and shape, and contiguous. */
static int fits_row(const Array *observation, const Py_buffer *array) {
    int ndim = observation->ndim, same = ndim == array->ndim - 1 && (observation->flags & C_CONTIGUOUS) &&
                                         observation->dtype == ((const Array *)array->obj)->dtype;
    for (int i = 0; same && i < ndim; i++)
        same = observation->shape[i] == array->shape[i + 1];
    return same;
}

/* Store an array or a number in its row. Return 1 if its shape or dtype differs from the array's. */
static int store_leaf(PyObject *observation, const Py_buffer *array, Py_ssize_t row) {
    Py_ssize_t bytes;
    char *to = row_address(array, row, &bytes);
    if (Py_TYPE(observation) == (PyTypeObject *)numpy_array && knows_fields &&
        Py_TYPE(array->obj) == (PyTypeObject *)numpy_array && fits_row((const Array *)observation, array)) {
        memmove(to, ((const Array *)observation)->data, (size_t)bytes); /* an env may return a view of this row */
        return 0;
    }
    if (PyLong_CheckExact(observation)) {
        long long number = PyLong_AsLongLong(observation);
        if (number == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 1;
        }
        if (array->ndim != 1 || bytes != sizeof number || (strcmp(array->format, "l") && strcmp(array->format, "q")))
            return 1;
        memcpy(to, &number, sizeof number);
        return 0;
    }
    Py_buffer from;
    if (Py_TYPE(observation) != (PyTypeObject *)numpy_array && PyObject_IsInstance(observation, numpy_scalar) <= 0) {
        PyErr_Clear();
        return 1; /* numpy may interpret other objects with a buffer, such as bytes, differently */
    }
    if (PyObject_GetBuffer(observation, &from, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 1;
    }
    int mismatch = from.ndim != array->ndim - 1 || from.format == NULL;
    for (int i = 0; !mismatch && i < from.ndim; i++)
        mismatch = from.shape[i] != array->shape[i + 1];
    if (!mismatch && from.len == bytes && strcmp(from.format, array->format) == 0)
        memmove(to, from.buf, (size_t)bytes); /* an env may return a view of this row */
    else
        mismatch = 1;
    PyBuffer_Release(&from);
    return mismatch;
}

/* Store an observation in its row, from the given leaf on. Return 1 if it does not match the tree. */
static int store_tree(PyObject *observation, PyObject *tree, const Outputs *outputs, int *leaf, Py_ssize_t row) {
    if (PyDict_CheckExact(tree)) {
        PyObject *key, *child;
        int mismatch = !PyDict_CheckExact(observation) && !PyODict_CheckExact(observation);
        for (Py_ssize_t place = 0; !mismatch && PyDict_Next(tree, &place, &key, &child);) {
            PyObject *item = PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(observation, key) : NULL;
            mismatch = item == NULL || store_tree(item, child, outputs, leaf, row);
        }
        PyErr_Clear();
        return mismatch;
    }
    if (PyTuple_CheckExact(tree)) {
        Py_ssize_t size = PyTuple_GET_SIZE(tree);
        int mismatch = !PyTuple_CheckExact(observation) || PyTuple_GET_SIZE(observation) != size;
        for (Py_ssize_t i = 0; !mismatch && i < size; i++)
            mismatch = store_tree(PyTuple_GET_ITEM(observation, i), PyTuple_GET_ITEM(tree, i), outputs, leaf, row);
        return mismatch;
    }
    return *leaf == outputs->leaf_count || store_leaf(observation, &outputs->leaves[(*leaf)++], row);
}

/* Return 0 or 1; -1 if the object is neither a Python nor a numpy bool. */
static int as_flag(PyObject *object) {
    if (object == Py_False || object == Py_True)
        return object == Py_True;
    return Py_TYPE(object) == (PyTypeObject *)numpy_bool ? PyObject_IsTrue(object) : -1;
}

/* Return 0; -1 if the object is neither a Python nor a numpy real number. */
static int as_number(PyObject *object, double *number) {
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

static PyObject *copy_containers(PyObject *value);

static PyObject *copy_list(PyObject *list) {
    PyObject *copy = PySequence_List(list);
    for (Py_ssize_t i = 0; copy != NULL && i < PyList_GET_SIZE(copy); i++) {
        PyObject *item = copy_containers(PyList_GET_ITEM(copy, i));
        if (item == NULL || PyList_SetItem(copy, i, item) < 0)
            Py_CLEAR(copy);
    }
    return copy;
}

static PyObject *copy_dict(PyObject *dict) {
    PyObject *copy = PyDict_Copy(dict), *key, *value;
    for (Py_ssize_t place = 0; copy != NULL && PyDict_Next(copy, &place, &key, &value);) {
        PyObject *item = copy_containers(value); /* this loop may replace the values of keys */
        if (item == NULL || PyDict_SetItem(copy, key, item) < 0)
            Py_CLEAR(copy);
        Py_XDECREF(item);
    }
    return copy;
}

/* Copy the arrays and containers of an info, into which an env may write later: as in spaces/autoreset.py. */
static PyObject *copy_containers(PyObject *value) {
    if (PyObject_TypeCheck(value, (PyTypeObject *)numpy_array))
        return PyObject_CallMethodNoArgs(value, str_copy);
    int is_dict = PyDict_CheckExact(value), is_list = PyList_CheckExact(value), is_tuple = PyTuple_CheckExact(value);
    int is_named = !is_tuple && PyTuple_Check(value) && PyObject_HasAttrString(value, "_make");
    if (!is_dict && !is_list && !is_tuple && !is_named)
        return Py_NewRef(value);
    if (Py_EnterRecursiveCall(" in an info"))
        return NULL;
    PyObject *copy = is_dict ? copy_dict(value) : copy_list(value);
    if (copy != NULL && !is_dict && !is_list)
        Py_SETREF(copy, is_named ? PyObject_CallMethod(value, "_make", "O", copy) : PyList_AsTuple(copy));
    Py_LeaveRecursiveCall();
    return copy;
}

/* The status of an outcome: stored; left to Python; left to Python, and probably so each time; the end of an episode
 * whose env is to be reset at once, with nothing stored; an exception. */
enum { STORED = 0, LEFT_TO_PYTHON = 1, NONSTANDARD = 2, ENDED = 3, RAISED = -1 };

/* Values of `at_end` that are no value of `pending_rows`. */
enum { END_LEFT_TO_PYTHON = -1, RESET_AT_ONCE = -2 };

static int append_info(PyObject *infos, Py_ssize_t row, PyObject *info) { /* takes the reference */
    PyObject *pair = Py_BuildValue("(nN)", row, info);
    int failed = pair == NULL ? -1 : PyList_Append(infos, pair);
    Py_XDECREF(pair);
    return failed;
}

static int store_info(PyObject *info, Py_ssize_t row, const Stepping *stepping) {
    PyObject *infos = stepping->infos;
    if (!PyDict_GET_SIZE(info))
        return 0;
    if (stepping->columns != NULL && stepping->columns->schemas != NULL) {
        if (add_info(stepping->columns, info, row))
            return 0;
        if (restore_infos(stepping->columns, infos) < 0)
            return -1;
    }
    return append_info(infos, row, copy_containers(info));
}

/* Store an observation, if it and the info are as expected; else return NONSTANDARD. */
static int store_observation(PyObject *observation, PyObject *info, Py_ssize_t row, const Outputs *outputs) {
    int leaf = 0;
    int mismatch = !PyDict_CheckExact(info) || store_tree(observation, outputs->tree, outputs, &leaf, row);
    return mismatch ? NONSTANDARD : STORED;
}

/* Store the rest of a row's results. */
static int store_rest(PyObject *observation, double reward, int terminated, int truncated, PyObject *info,
                      Py_ssize_t row, const Stepping *stepping, Outputs *outputs) {
    if (store_info(info, row, stepping) < 0)
        return RAISED;
    ((double *)outputs->flags[0].buf)[row] = reward;
    ((char *)outputs->flags[1].buf)[row] = (char)terminated;
    ((char *)outputs->flags[2].buf)[row] = (char)truncated;
    return PyList_SetItem(outputs->last, row, Py_NewRef(observation)) < 0 ? RAISED : STORED;
}

static int store_step(PyObject *outcome, Py_ssize_t row, const Stepping *stepping, Outputs *outputs) {
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 5)
        return LEFT_TO_PYTHON;
    int terminated = as_flag(PyTuple_GET_ITEM(outcome, 2)), truncated = as_flag(PyTuple_GET_ITEM(outcome, 3));
    double reward;
    if (terminated < 0 || truncated < 0 || as_number(PyTuple_GET_ITEM(outcome, 1), &reward) < 0)
        return NONSTANDARD;
    int ends = terminated || truncated;
    PyObject *observation = PyTuple_GET_ITEM(outcome, 0), *info = PyTuple_GET_ITEM(outcome, 4);
    if (ends && stepping->at_end == RESET_AT_ONCE)
        return PyDict_CheckExact(info) ? ENDED : NONSTANDARD;
    if (ends && stepping->at_end == END_LEFT_TO_PYTHON)
        return LEFT_TO_PYTHON;
    int status = store_observation(observation, info, row, outputs);
    if (status == STORED)
        status = store_rest(observation, reward, terminated, truncated, info, row, stepping, outputs);
    if (status == STORED && ends && PyList_SetItem(stepping->pending_rows, row, PyLong_FromLong(stepping->at_end)) < 0)
        return RAISED;
    return status;
}

static int store_reset(PyObject *outcome, Py_ssize_t row, const Stepping *stepping, Outputs *outputs) {
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 2)
        return LEFT_TO_PYTHON;
    PyObject *observation = PyTuple_GET_ITEM(outcome, 0), *info = PyTuple_GET_ITEM(outcome, 1);
    int status = store_observation(observation, info, row, outputs);
    if (status == STORED)
        status = store_rest(observation, 0, 0, 0, info, row, stepping, outputs);
    if (status == STORED && PyList_SetItem(stepping->pending_rows, row, PyLong_FromLong(0)) < 0)
        return RAISED;
    return status;
}

/* Copy the outcome of an episode's last step: the reset may write into what the env has returned. Return NULL, without
 * an exception, if that fails. */
static PyObject *copy_last_step(PyObject *outcome) {
    PyObject *copy = PyTuple_New(5);
    for (Py_ssize_t i = 0; copy != NULL && i < 5; i++) {
        PyObject *item = PyTuple_GET_ITEM(outcome, i);
        item = i == 0 || i == 4 ? copy_containers(item) : Py_NewRef(item);
        PyTuple_SET_ITEM(copy, i, item);
        if (item == NULL)
            Py_CLEAR(copy);
    }
    if (copy == NULL)
        PyErr_Clear();
    return copy;
}

/* Store an episode's last step, and what the reset after it returned. */
static int store_both(PyObject *step, PyObject *reset, Py_ssize_t row, const Stepping *stepping, Outputs *outputs) {
    if (!PyTuple_CheckExact(reset) || PyTuple_GET_SIZE(reset) != 2)
        return LEFT_TO_PYTHON;
    PyObject *observation = PyTuple_GET_ITEM(reset, 0), *info = PyTuple_GET_ITEM(reset, 1);
    if (store_observation(observation, info, row, outputs) != STORED)
        return NONSTANDARD;
    for (int i = 0; i < 2; i++) { /* Python merges these with those of the last step */
        int has_final = PyDict_Contains(info, i ? str_final_info : str_final_obs);
        if (has_final)
            return has_final < 0 ? RAISED : LEFT_TO_PYTHON;
    }
    Columns *columns = stepping->columns;
    if (columns != NULL && columns->schemas != NULL && restore_infos(columns, stepping->infos) < 0)
        return RAISED;
    PyObject *final = Py_BuildValue("{OOOO}", str_final_obs, PyTuple_GET_ITEM(step, 0), str_final_info,
                                    PyTuple_GET_ITEM(step, 4));
    if (append_info(stepping->infos, row, final) < 0)
        return RAISED;
    double reward = 0;
    as_number(PyTuple_GET_ITEM(step, 1), &reward); /* `store_step` has found that it is one */
    int terminated = as_flag(PyTuple_GET_ITEM(step, 2)), truncated = as_flag(PyTuple_GET_ITEM(step, 3));
    return store_rest(observation, reward, terminated, truncated, info, row, stepping, outputs);
}

PyObject *take_exception(void) {
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

/* Reset an env after its episode's last step, and store both; `outcome` becomes what the reset returned or raised. */
static int reset_at_once(PyObject *last_step, PyObject **outcome, Py_ssize_t row, Py_ssize_t rows,
                         const Stepping *stepping, Outputs *outputs) {
    if (PyList_GET_SIZE(stepping->resets) != rows)
        return RAISED;
    PyObject *reset = Py_NewRef(PyList_GET_ITEM(stepping->resets, row));
    Py_SETREF(*outcome, PyObject_CallNoArgs(reset));
    Py_DECREF(reset);
    if (*outcome == NULL) {
        *outcome = take_exception();
        return LEFT_TO_PYTHON;
    }
    if (PyList_GET_SIZE(outputs->last) != rows)
        return RAISED;
    return store_both(last_step, *outcome, row, stepping, outputs);
}

int step_from(Py_ssize_t row, const Stepping *stepping, StopPoint *stopped) {
    PyObject *actions = stepping->actions, *pending_rows = stepping->pending_rows;
    Outputs outputs;
    Py_buffer current_row;
    *stopped = (StopPoint){.row = row};
    if (get_outputs(stepping->outputs, &outputs) < 0)
        return -1;
    if (PyObject_GetBuffer(stepping->current_row, &current_row, PyBUF_WRITABLE) < 0) {
        release_outputs(&outputs);
        return -1;
    }
    Py_ssize_t rows = PyList_GET_SIZE(outputs.last), first = stepping->first, count = PyList_GET_SIZE(actions);
    PyObject *outcome = NULL, *last_step = NULL;
    int status = STORED;
    if (first < 0 || row < first || first + count > rows || current_row.len < (Py_ssize_t)sizeof(uint32_t))
        status = RAISED;
    for (; status == STORED && row < first + count; row++) {
        /* An env may change anything, these lists too. */
        if (PyList_GET_SIZE(actions) != count || PyList_GET_SIZE(stepping->steps) != rows ||
            PyList_GET_SIZE(stepping->resets) != rows || PyList_GET_SIZE(pending_rows) != rows ||
            PyList_GET_SIZE(outputs.last) != rows) {
            status = RAISED;
            break;
        }
        PyObject *pending = PyList_GET_ITEM(pending_rows, row);
        /* This runs no Python code, so the lists stay as they are. */
        long next = PyLong_Check(pending) ? PyLong_AsLong(pending) : -1;
        if (next != 0 && (next != 1 || PyDict_GET_SIZE(stepping->seeds))) {
            PyErr_Clear(); /* of a number that is too large */
            status = LEFT_TO_PYTHON;
            break;
        }
        *(volatile uint32_t *)current_row.buf = (uint32_t)(row + 1);
        PyObject *callee = Py_NewRef(PyList_GET_ITEM(next ? stepping->resets : stepping->steps, row));
        if (next) {
            outcome = PyObject_CallNoArgs(callee);
        } else {
            PyObject *action = Py_NewRef(PyList_GET_ITEM(actions, row - first));
            outcome = PyObject_CallOneArg(callee, action);
            Py_DECREF(action);
        }
        Py_DECREF(callee);
        if (outcome == NULL) {
            outcome = take_exception();
            status = LEFT_TO_PYTHON;
            break;
        }
        if (PyList_GET_SIZE(pending_rows) != rows || PyList_GET_SIZE(outputs.last) != rows)
            status = RAISED;
        else
            status = (next ? store_reset : store_step)(outcome, row, stepping, &outputs);
        if (status == ENDED) {
            last_step = copy_last_step(outcome);
            status = LEFT_TO_PYTHON;
            if (last_step != NULL)
                status = reset_at_once(last_step, &outcome, row, rows, stepping, &outputs);
        }
        if (status != STORED)
            break;
        Py_CLEAR(outcome);
        Py_CLEAR(last_step);
    }
    PyBuffer_Release(&current_row);
    release_outputs(&outputs);
    if (status == RAISED) {
        Py_XDECREF(outcome);
        Py_XDECREF(last_step);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "expected one entry per row in each list");
        return -1;
    }
    *stopped = (StopPoint){row, outcome, last_step, status == NONSTANDARD};
    return 0;
}

PyObject *step_rows(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 11 || !PyList_Check(args[2]) || !PyList_Check(args[3]) || !PyList_Check(args[4]) ||
        !PyList_Check(args[5]) || !PyDict_Check(args[6]) || !PyList_Check(args[9])) {
        PyErr_SetString(PyExc_TypeError, "step_rows: expected 11 arguments, lists and a dict among them");
        return NULL;
    }
    Stepping stepping = {0, args[2], args[3], args[4], args[5], args[6], args[8], args[9], args[10], NULL, 0};
    stepping.first = PyLong_AsSsize_t(args[1]);
    stepping.at_end = PyLong_AsLong(args[7]);
    Py_ssize_t row = PyLong_AsSsize_t(args[0]);
    StopPoint stopped;
    if (PyErr_Occurred() || step_from(row, &stepping, &stopped) < 0)
        return NULL;
    return Py_BuildValue("(nNON)", stopped.row, stopped.outcome == NULL ? Py_NewRef(Py_NotImplemented) : stopped.outcome,
                         stopped.nonstandard ? Py_True : Py_False,
                         stopped.last_step == NULL ? Py_NewRef(Py_None) : stopped.last_step);
}
