/* Stepping the envs of a worker: see spaces/autoreset.py and worker/row_buffers.py. */

#include "c.h"

enum { MAX_LEAVES = 16 };

/* Where results go. */
typedef struct {
    PyObject *tree; /* of observations: an array, or dicts and tuples of arrays */
    int taken;
    Py_buffer leaves[MAX_LEAVES]; /* of the tree, in its order */
    int flags;
    Py_buffer of_flags[3]; /* rewards, terminated, truncated */
    PyObject *last;
} Into;

static void release_into(Into *into) {
    while (into->flags)
        PyBuffer_Release(&into->of_flags[--into->flags]);
    while (into->taken)
        PyBuffer_Release(&into->leaves[--into->taken]);
}

static int take_array(PyObject *array, Py_buffer *view) {
    return PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS);
}

static int take_leaf(PyObject *array, Py_ssize_t rows, Into *into) {
    Py_buffer *leaf = &into->leaves[into->taken];
    if (into->taken == MAX_LEAVES) {
        PyErr_SetString(PyExc_ValueError, "into: more arrays than there is room for");
        return -1;
    }
    if (take_array(array, leaf) < 0)
        return -1;
    into->taken++;
    if (leaf->ndim >= 1 && leaf->shape[0] == rows)
        return 0;
    PyErr_SetString(PyExc_ValueError, "into: expected as many rows everywhere");
    return -1;
}

/* Takes the arrays of a tree, each of so many rows. */
static int take_tree(PyObject *tree, Py_ssize_t rows, Into *into) {
    int is_dict = PyDict_CheckExact(tree), failed = 0;
    if (!is_dict && !PyTuple_CheckExact(tree))
        return take_leaf(tree, rows, into);
    if (Py_EnterRecursiveCall(" in a tree of arrays"))
        return -1;
    PyObject *key, *child;
    for (Py_ssize_t place = 0; is_dict && !failed && PyDict_Next(tree, &place, &key, &child);)
        failed = take_tree(child, rows, into);
    for (Py_ssize_t i = 0; !is_dict && !failed && i < PyTuple_GET_SIZE(tree); i++)
        failed = take_tree(PyTuple_GET_ITEM(tree, i), rows, into);
    Py_LeaveRecursiveCall();
    return failed;
}

static int take_into(PyObject *five, Into *into) {
    into->taken = into->flags = 0;
    if (!PyTuple_Check(five) || PyTuple_GET_SIZE(five) != 5 || !PyList_Check(PyTuple_GET_ITEM(five, 4))) {
        PyErr_SetString(PyExc_TypeError, "into: expected arrays of observations, three more, and a list");
        return -1;
    }
    into->tree = PyTuple_GET_ITEM(five, 0);
    into->last = PyTuple_GET_ITEM(five, 4);
    Py_ssize_t rows = PyList_GET_SIZE(into->last);
    if (take_tree(into->tree, rows, into) < 0) {
        release_into(into);
        return -1;
    }
    for (; into->flags < 3; into->flags++)
        if (take_array(PyTuple_GET_ITEM(five, 1 + into->flags), &into->of_flags[into->flags]) < 0) {
            release_into(into);
            return -1;
        }
    const Py_buffer *of = into->of_flags;
    if (of[0].len != rows * (Py_ssize_t)sizeof(double) || of[1].len != rows || of[2].len != rows) {
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

/* Puts an array or a number into its row; 1 if it is not of the shape and the dtype that belong there. */
static int put_leaf(PyObject *observation, const Py_buffer *into, Py_ssize_t row) {
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
        memmove(to, from.buf, (size_t)bytes); /* an env may give a view of where it goes */
    else
        odd = 1;
    PyBuffer_Release(&from);
    return odd;
}

/* Puts an observation into its row, from such a leaf of the tree on; 1 if it is not what belongs there. */
static int put_tree(PyObject *observation, PyObject *tree, const Into *into, int *leaf, Py_ssize_t row) {
    if (PyDict_CheckExact(tree)) {
        PyObject *key, *child;
        int odd = !PyDict_CheckExact(observation) && !PyODict_CheckExact(observation);
        for (Py_ssize_t place = 0; !odd && PyDict_Next(tree, &place, &key, &child);) {
            PyObject *item = PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(observation, key) : NULL;
            odd = item == NULL || put_tree(item, child, into, leaf, row);
        }
        PyErr_Clear();
        return odd;
    }
    if (PyTuple_CheckExact(tree)) {
        Py_ssize_t size = PyTuple_GET_SIZE(tree);
        int odd = !PyTuple_CheckExact(observation) || PyTuple_GET_SIZE(observation) != size;
        for (Py_ssize_t i = 0; !odd && i < size; i++)
            odd = put_tree(PyTuple_GET_ITEM(observation, i), PyTuple_GET_ITEM(tree, i), into, leaf, row);
        return odd;
    }
    return *leaf == into->taken || put_leaf(observation, &into->leaves[(*leaf)++], row);
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

static int note_info(PyObject *info, Py_ssize_t row, const Stepping *stepping) {
    PyObject *infos = stepping->infos;
    if (!PyDict_GET_SIZE(info))
        return 0;
    if (stepping->columns != NULL && stepping->columns->sorts != NULL) {
        if (note_columns(stepping->columns, info, row))
            return 0;
        if (take_back(stepping->columns, infos) < 0)
            return -1;
    }
    PyObject *pair = Py_BuildValue("(nN)", row, PyDict_Copy(info)); /* the next env may write into the same one */
    int failed = pair == NULL ? -1 : PyList_Append(infos, pair);
    Py_XDECREF(pair);
    return failed;
}

/* What becomes of an outcome: it is put down; it is for Python; so are probably all; an exception. */
enum { DONE = 0, APART = 1, ODD = 2, RAISED = -1 };

static int put_down(PyObject *observation, double reward, int terminated, int truncated, PyObject *info, Py_ssize_t row,
                    const Stepping *stepping, Into *into) {
    if (!PyDict_CheckExact(info))
        return ODD;
    int leaf = 0;
    if (put_tree(observation, into->tree, into, &leaf, row))
        return ODD;
    if (note_info(info, row, stepping) < 0)
        return RAISED;
    ((double *)into->of_flags[0].buf)[row] = reward;
    ((char *)into->of_flags[1].buf)[row] = (char)terminated;
    ((char *)into->of_flags[2].buf)[row] = (char)truncated;
    return PyList_SetItem(into->last, row, Py_NewRef(observation)) < 0 ? RAISED : DONE;
}

static int put_step(PyObject *outcome, Py_ssize_t row, const Stepping *stepping, Into *into) {
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 5)
        return APART;
    int terminated = flag_of(PyTuple_GET_ITEM(outcome, 2)), truncated = flag_of(PyTuple_GET_ITEM(outcome, 3));
    double reward;
    if (terminated < 0 || truncated < 0 || number_of(PyTuple_GET_ITEM(outcome, 1), &reward) < 0)
        return ODD;
    int ends = terminated || truncated;
    if (ends && stepping->at_end < 0)
        return APART;
    int put = put_down(PyTuple_GET_ITEM(outcome, 0), reward, terminated, truncated, PyTuple_GET_ITEM(outcome, 4), row,
                       stepping, into);
    if (put == DONE && ends && PyList_SetItem(stepping->due, row, PyLong_FromLong(stepping->at_end)) < 0)
        return RAISED;
    return put;
}

static int put_reset(PyObject *outcome, Py_ssize_t row, const Stepping *stepping, Into *into) {
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 2)
        return APART;
    int put = put_down(PyTuple_GET_ITEM(outcome, 0), 0, 0, 0, PyTuple_GET_ITEM(outcome, 1), row, stepping, into);
    if (put == DONE && PyList_SetItem(stepping->due, row, PyLong_FromLong(0)) < 0)
        return RAISED;
    return put;
}

PyObject *caught(void) {
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

int step_from(Py_ssize_t row, const Stepping *stepping, Stopped *stopped) {
    PyObject *actions = stepping->actions, *due = stepping->due;
    Into into;
    Py_buffer mark;
    *stopped = (Stopped){.row = row};
    if (take_into(stepping->into, &into) < 0)
        return -1;
    if (PyObject_GetBuffer(stepping->mark, &mark, PyBUF_WRITABLE) < 0) {
        release_into(&into);
        return -1;
    }
    Py_ssize_t rows = PyList_GET_SIZE(into.last), first = stepping->first, count = PyList_GET_SIZE(actions);
    PyObject *outcome = NULL;
    int put = DONE;
    if (first < 0 || row < first || first + count > rows || mark.len < (Py_ssize_t)sizeof(uint32_t))
        put = RAISED;
    for (; put == DONE && row < first + count; row++) {
        /* an env may do anything, to these lists too */
        if (PyList_GET_SIZE(actions) != count || PyList_GET_SIZE(stepping->steps) != rows ||
            PyList_GET_SIZE(stepping->resets) != rows || PyList_GET_SIZE(due) != rows ||
            PyList_GET_SIZE(into.last) != rows) {
            put = RAISED;
            break;
        }
        PyObject *what = PyList_GET_ITEM(due, row);
        long next = PyLong_Check(what) ? PyLong_AsLong(what) : -1; /* which runs no Python: the lists stay as they are */
        if (next != 0 && (next != 1 || PyDict_GET_SIZE(stepping->seeds))) {
            PyErr_Clear(); /* of what is no number */
            put = APART;
            break;
        }
        *(volatile uint32_t *)mark.buf = (uint32_t)(row + 1);
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
            outcome = caught();
            put = APART;
            break;
        }
        if (PyList_GET_SIZE(due) != rows || PyList_GET_SIZE(into.last) != rows)
            put = RAISED;
        else
            put = (next ? put_reset : put_step)(outcome, row, stepping, &into);
        if (put != DONE)
            break;
        Py_CLEAR(outcome);
    }
    PyBuffer_Release(&mark);
    release_into(&into);
    if (put == RAISED) {
        Py_XDECREF(outcome);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "expected one of everything a row");
        return -1;
    }
    *stopped = (Stopped){.row = row, .outcome = outcome, .odd = put == ODD};
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
    Stopped stopped;
    if (PyErr_Occurred() || step_from(row, &stepping, &stopped) < 0)
        return NULL;
    return Py_BuildValue("(nNO)", stopped.row, stopped.outcome == NULL ? Py_NewRef(Py_NotImplemented) : stopped.outcome,
                         stopped.odd ? Py_True : Py_False);
}
