/* Step an env as Gymnasium's own wrappers around it do: see spaces/wrapped_steps.py. */

#include "c.h"

/* The arguments of `step_below`, which `step_env` gets as one tuple. */
enum { OUTER_STEP, CHAIN, CONDITIONS, LIMIT, UNPACK, ARGUMENTS };

/* Return whether each wrapper still wraps the next one; -1: exception. */
static int is_intact(PyObject *chain) {
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(chain); i++) {
        PyObject *inner = PyObject_GetAttr(PyTuple_GET_ITEM(chain, i), str_env);
        if (inner == NULL)
            return -1;
        Py_DECREF(inner); /* the wrapper has it */
        if (inner != PyTuple_GET_ITEM(chain, i + 1))
            return 0;
    }
    return 1;
}

/* Return whether these attributes, pairs of a wrapper and a name, are all True; -1: exception. If so, the list is
 * emptied: they stay True. */
static int all_true(PyObject *attributes) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(attributes); i++) {
        PyObject *pair = Py_NewRef(PyList_GET_ITEM(attributes, i)), *wrapper, *name;
        PyObject *value = PyArg_Parse(pair, "(OO)", &wrapper, &name) ? PyObject_GetAttr(wrapper, name) : NULL;
        Py_DECREF(pair);
        if (value == NULL)
            return -1;
        Py_DECREF(value);
        if (value != Py_True)
            return 0;
    }
    return PyList_GET_SIZE(attributes) && PyList_SetSlice(attributes, 0, PY_SSIZE_T_MAX, NULL) < 0 ? -1 : 1;
}

/* Count a step of a TimeLimit. Return whether it was the last one of the episode; -1: exception. */
static int is_last_step(PyObject *limit) {
    PyObject *one = PyLong_FromLong(1), *before = PyObject_GetAttr(limit, str__elapsed_steps);
    PyObject *steps = one == NULL || before == NULL ? NULL : PyNumber_InPlaceAdd(before, one);
    PyObject *most = NULL;
    if (steps != NULL && PyObject_SetAttr(limit, str__elapsed_steps, steps) == 0)
        most = PyObject_GetAttr(limit, str__max_episode_steps);
    int last = most == NULL ? -1 : PyObject_RichCompareBool(steps, most, Py_GE);
    Py_XDECREF(one);
    Py_XDECREF(before);
    Py_XDECREF(steps);
    Py_XDECREF(most);
    return last;
}

static PyObject *step_env(PyObject *arguments, PyObject *action) {
    PyObject *chain = PyTuple_GET_ITEM(arguments, CHAIN), *limit = PyTuple_GET_ITEM(arguments, LIMIT);
    int inside = is_intact(chain);
    if (inside > 0)
        inside = all_true(PyTuple_GET_ITEM(arguments, CONDITIONS));
    if (inside <= 0)
        return inside < 0 ? NULL : PyObject_CallOneArg(PyTuple_GET_ITEM(arguments, OUTER_STEP), action);
    PyObject *call[] = {PyTuple_GET_ITEM(chain, PyTuple_GET_SIZE(chain) - 1), action};
    PyObject *outcome = PyObject_VectorcallMethod(str_step, call, 2, NULL);
    if (outcome == NULL || limit == Py_None)
        return outcome;
    if (!PyTuple_CheckExact(outcome) || PyTuple_GET_SIZE(outcome) != 5) {
        Py_SETREF(outcome, PyObject_CallOneArg(PyTuple_GET_ITEM(arguments, UNPACK), outcome));
        if (outcome == NULL)
            return NULL;
        if (!is_tuple_of_size(outcome, 5)) {
            Py_DECREF(outcome);
            PyErr_SetString(PyExc_TypeError, "step_below: expected `unpack` to return a tuple of 5");
            return NULL;
        }
    }
    int last = is_last_step(limit);
    if (last < 0)
        Py_CLEAR(outcome);
    else if (last)
        Py_SETREF(outcome, PyTuple_Pack(5, PyTuple_GET_ITEM(outcome, 0), PyTuple_GET_ITEM(outcome, 1),
                                        PyTuple_GET_ITEM(outcome, 2), Py_True, PyTuple_GET_ITEM(outcome, 4)));
    return outcome;
}

static PyMethodDef method = {"step", step_env, METH_O, NULL};

PyObject *step_below(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != ARGUMENTS || !PyTuple_CheckExact(args[CHAIN]) || PyTuple_GET_SIZE(args[CHAIN]) < 2 ||
        !PyList_CheckExact(args[CONDITIONS])) {
        PyErr_SetString(PyExc_TypeError, "step_below: expected 5 arguments, a tuple and a list among them");
        return NULL;
    }
    PyObject *arguments = PyTuple_New(ARGUMENTS);
    for (Py_ssize_t i = 0; arguments != NULL && i < ARGUMENTS; i++)
        PyTuple_SET_ITEM(arguments, i, Py_NewRef(args[i]));
    PyObject *step = arguments == NULL ? NULL : PyCFunction_NewEx(&method, arguments, NULL);
    Py_XDECREF(arguments);
    return step;
}
