/* Remembered calls, replayed: what Memory and _Replay of _replay.py do in Python, without Python's share of the time.

   recall() compares the arguments of a call with those of the calls that it is given, most recent first. Where all of
   them agree, it makes the outputs, launches the kernel (or calls the compiled loop) on the pointers and returns what
   the call returned. It returns None, with nothing done, where the call is not known. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { ENTRIES = 96, TENSORS = 32, PARAMETERS = 192, NO_CONTEXT = 201 };

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                            void **extra);
typedef int (*ErrorString)(int status, const char **text);
typedef void (*Loop)(int64_t given);

/* ------------------------------------------------------------------------------------------- what setup() is given */
static PyObject *tensor_type, *data_ptr, *grad_enabled, *increment_version, *current_device, *current_stream;
static PyObject *is_nested; /* the name */
static PyObject *silent;  /* ((function, result), ...): without these results, something follows the call */
static PyObject *unset;   /* ((object, attribute, value), ...): likewise */
static LaunchKernel launch_kernel;
static ErrorString error_string;

static PyObject *setup(PyObject *self, PyObject *args) {
    unsigned long long launch, error;
    if (!PyArg_ParseTuple(args, "OOOOOOO!O!KK", &tensor_type, &data_ptr, &grad_enabled, &increment_version,
                          &current_device, &current_stream, &PyTuple_Type, &silent, &PyTuple_Type, &unset, &launch,
                          &error))
        return NULL;
    Py_INCREF(args); /* the module keeps them all */
    if (!is_nested && !(is_nested = PyUnicode_InternFromString("is_nested")))
        return NULL;
    launch_kernel = (LaunchKernel)(uintptr_t)launch;
    error_string = (ErrorString)(uintptr_t)error;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------- arguments */
typedef struct {
    PyObject *entries[ENTRIES]; /* borrowed; NULL for a tuple, whose entries follow */
    Py_ssize_t sizes[ENTRIES];  /* of a tuple, -1 for anything else */
    Py_ssize_t count;
} Arguments;

static int append(Arguments *to, PyObject *x, Py_ssize_t size) {
    if (to->count == ENTRIES)
        return 0;
    to->entries[to->count] = x;
    to->sizes[to->count++] = size;
    return 1;
}

static int append_given(Arguments *to, PyObject *x) {
    if (!PyTuple_CheckExact(x)) /* of a list another thread might drop the entries */
        return append(to, x, -1);
    if (!append(to, NULL, PyTuple_GET_SIZE(x)))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); i++)
        if (!append(to, PyTuple_GET_ITEM(x, i), -1))
            return 0;
    return 1;
}

/* Positional and named arguments, with what tuples hold; 0 where those are too many. */
static int flatten(Arguments *to, PyObject *args, PyObject *kwargs) {
    to->count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!append_given(to, PyTuple_GET_ITEM(args, i)))
            return 0;
    PyObject *name, *x;
    Py_ssize_t at = 0;
    while (kwargs != Py_None && PyDict_Next(kwargs, &at, &name, &x))
        if (!append(to, name, -1) || !append_given(to, x))
            return 0;
    return 1;
}

/* Whose index is the first of equal pointers, for each. */
static void firsts(uint8_t *first, const uintptr_t *pointers, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t j = 0;
        while (pointers[j] != pointers[i])
            j++;
        first[i] = (uint8_t)j;
    }
}

/* ------------------------------------------------------------------------------------------------------------ calls */
typedef struct {
    int32_t parameter, place;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *owned;               /* what the pointers below lead to, but for the entries */
    Py_ssize_t count;              /* of arguments */
    PyObject *entries[ENTRIES];    /* a constant, or NULL for a tensor and for a tuple */
    Py_ssize_t sizes[ENTRIES];
    Py_ssize_t tensors;
    uint8_t same[TENSORS], at[TENSORS]; /* the first tensor that is this one, that starts where this one does */
    PyObject *grad, *guard, *device; /* None on a CPU */
    unsigned alignment;            /* of all pointers, which guards do not see */
    Py_ssize_t made;
    PyObject *making;              /* ((function, *arguments), ...) for a new tensor each */
    PyObject *overwritten, *returned; /* places: given tensors, then those made */
    int single;                    /* one tensor is returned, not a tuple */
    PyObject *run, *sources, *outputs, *constants; /* where a launch is Python's: places of pointers, then constants */
    Py_ssize_t initial;
    void *function;
    unsigned grid[3], threads, shared; /* no threads: the function is a loop on a CPU */
    PyObject *meeting;             /* a function that gives the tensor of place -1, or None */
    int parameters, slots;
    uint64_t values[PARAMETERS];
    Slot slot[PARAMETERS];
} Call;

static void call_dealloc(Call *self) {
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_XDECREF(self->entries[i]);
    Py_XDECREF(self->owned);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *unused) {
    PyObject *given, *kwargs, *aliases, *python, *direct, *kept;
    Call *self = (Call *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (!PyArg_ParseTuple(args, "O!OOOOIO!O!O!O!pOO", &PyTuple_Type, &given, &kwargs, &self->grad, &self->guard,
                          &self->device, &self->alignment, &PyTuple_Type, &aliases, &PyTuple_Type, &self->making,
                          &PyTuple_Type, &self->overwritten, &PyTuple_Type, &self->returned, &self->single, &python,
                          &direct))
        goto error;
    self->owned = PyTuple_GetSlice(args, 2, PyTuple_GET_SIZE(args)); /* not the arguments: they are the caller's */
    if (!self->owned)
        goto error;
    self->made = PyTuple_GET_SIZE(self->making);

    Arguments flat;
    uintptr_t tensors[TENSORS];
    if (!flatten(&flat, given, kwargs))
        goto too_many;
    for (Py_ssize_t i = 0; i < flat.count; i++) {
        PyObject *x = flat.entries[i];
        self->sizes[i] = flat.sizes[i];
        int tensor = x ? PyObject_IsInstance(x, tensor_type) : 0;
        if (tensor < 0)
            goto error;
        if (tensor) {
            if (self->tensors == TENSORS)
                goto too_many;
            tensors[self->tensors++] = (uintptr_t)x;
        }
        self->entries[i] = tensor ? NULL : Py_XNewRef(x);
        self->count = i + 1;
    }
    if (self->tensors + self->made > TENSORS)
        goto too_many;
    firsts(self->same, tensors, self->tensors);
    if (PyTuple_GET_SIZE(aliases) != self->tensors) {
        PyErr_SetString(PyExc_ValueError, "one alias for each tensor among the arguments");
        goto error;
    }
    for (Py_ssize_t i = 0; i < self->tensors; i++)
        self->at[i] = (uint8_t)PyLong_AsLong(PyTuple_GET_ITEM(aliases, i));

    if (direct == Py_None) {
        if (!PyArg_ParseTuple(python, "OO!O!nO!O", &self->run, &PyTuple_Type, &self->sources, &PyTuple_Type,
                              &self->outputs, &self->initial, &PyTuple_Type, &self->constants, &kept) ||
            PyErr_Occurred())
            goto error;
        return (PyObject *)self;
    }
    unsigned long long function;
    const char *values;
    Py_ssize_t size;
    PyObject *slots;
    if (!PyArg_ParseTuple(direct, "K(III)IIy#O!O", &function, &self->grid[0], &self->grid[1], &self->grid[2],
                          &self->threads, &self->shared, &values, &size, &PyTuple_Type, &slots, &self->meeting))
        goto error;
    self->function = (void *)(uintptr_t)function;
    self->parameters = (int)(size / 8);
    self->slots = (int)PyTuple_GET_SIZE(slots);
    if (self->parameters > PARAMETERS || self->slots > self->parameters)
        goto too_many;
    memcpy(self->values, values, (size_t)size);
    for (int i = 0; i < self->slots; i++)
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "ii", &self->slot[i].parameter, &self->slot[i].place))
            goto error;
    if (!PyErr_Occurred())
        return (PyObject *)self;
    goto error;
too_many:
    PyErr_SetString(PyExc_OverflowError, "more arguments than a replayed call may have");
error:
    Py_DECREF(self);
    return NULL;
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rl_triton_td_replay.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = call_new,
    .tp_dealloc = (destructor)call_dealloc,
};

/* --------------------------------------------------------------------------------------------------------- comparing */
/* -1 with an error, as below. */
static int equal(PyObject *x, PyObject *y) {
    if (x == y)
        return 1;
    if (Py_TYPE(x) != Py_TYPE(y))
        return 0;
    int same = PyObject_RichCompareBool(x, y, Py_EQ);
    if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) { /* an interrupt is none */
        PyErr_Clear();
        return 0;
    }
    return same;
}

/* Whether something follows what is done with tensors, or must see it; -1 with an error. */
static int followed(void) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(silent); i++) {
        PyObject *pair = PyTuple_GET_ITEM(silent, i), *result = PyObject_CallNoArgs(PyTuple_GET_ITEM(pair, 0));
        if (!result)
            return -1;
        Py_DECREF(result); /* compared by identity with what lives on: None, a bool, a small int */
        if (result != PyTuple_GET_ITEM(pair, 1))
            return 1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(unset); i++) {
        PyObject *entry = PyTuple_GET_ITEM(unset, i);
        PyObject *value = PyObject_GetAttr(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
        if (!value)
            return -1;
        Py_DECREF(value);
        if (value != PyTuple_GET_ITEM(entry, 2))
            return 1;
    }
    return 0;
}

/* Tensors and their pointers while a call is played: those given, those made, and where segments meet. */
typedef struct {
    PyObject *tensors[TENSORS + 1];
    PyObject *numbers[TENSORS + 1]; /* their pointers as Python has them */
    uintptr_t pointers[TENSORS + 1];
    Py_ssize_t count;
} Known;

/* Takes the reference to a tensor, or passes on the error where there is none. */
static int add(Known *known, PyObject *tensor) {
    PyObject *number = tensor ? PyObject_CallOneArg(data_ptr, tensor) : NULL;
    uintptr_t pointer = number ? (uintptr_t)PyLong_AsUnsignedLongLongMask(number) : 0;
    if (!number || (pointer == (uintptr_t)-1 && PyErr_Occurred())) {
        Py_XDECREF(number);
        Py_XDECREF(tensor);
        return 0;
    }
    known->tensors[known->count] = tensor;
    known->numbers[known->count] = number;
    known->pointers[known->count++] = pointer;
    return 1;
}

static void forget(Known *known) {
    for (Py_ssize_t i = 0; i < known->count; i++) {
        Py_DECREF(known->numbers[i]);
        Py_DECREF(known->tensors[i]);
    }
}

/* Whether a tensor is a nested one, on which guards end the process; -1 with an error. */
static int nested(PyObject *tensor) {
    PyObject *is = PyObject_GetAttr(tensor, is_nested);
    Py_XDECREF(is); /* a bool lives on */
    return is ? is != Py_False : -1;
}

/* Whether `call` is that of the arguments; -1 with an error. */
static int fits(Call *call, const Arguments *flat, Known *known) {
    PyObject *tensors[TENSORS];
    uintptr_t ids[TENSORS];
    uint8_t first[TENSORS];
    Py_ssize_t count = 0, unique = 0;
    if (call->count != flat->count || memcmp(call->sizes, flat->sizes, (size_t)flat->count * sizeof *flat->sizes))
        return 0;
    for (Py_ssize_t i = 0; i < flat->count; i++) {
        if (call->sizes[i] >= 0)
            continue;
        if (!call->entries[i]) {
            tensors[count++] = flat->entries[i];
            continue;
        }
        int same = equal(call->entries[i], flat->entries[i]);
        if (same < 1)
            return same;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        ids[i] = (uintptr_t)tensors[i];
    firsts(first, ids, count);
    if (memcmp(first, call->same, (size_t)count))
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int no = PyObject_TypeCheck(tensors[i], (PyTypeObject *)tensor_type) ? nested(tensors[i]) : 1;
        if (no)
            return no < 0 ? -1 : 0;
        unique += first[i] == i;
    }
    PyObject *guarded = PyTuple_New(unique);
    if (!guarded)
        return -1;
    for (Py_ssize_t i = 0, k = 0; i < count; i++)
        if (first[i] == i)
            PyTuple_SET_ITEM(guarded, k++, Py_NewRef(tensors[i]));
    PyObject *fit = PyObject_Call(call->guard, guarded, NULL);
    Py_DECREF(guarded);
    if (fit != Py_True) {
        Py_XDECREF(fit);
        return fit ? 0 : -1;
    }
    Py_DECREF(fit);
    uintptr_t all = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!add(known, Py_NewRef(tensors[i])))
            return -1;
        if (!known->pointers[i])
            return 0;
        all |= known->pointers[i];
    }
    if (all & (call->alignment - 1))
        return 0;
    firsts(first, known->pointers, count);
    if (memcmp(first, call->at, (size_t)count))
        return 0;
    if (call->device != Py_None) {
        PyObject *current = PyObject_CallNoArgs(current_device);
        if (!current)
            return -1;
        int here = equal(current, call->device);
        Py_DECREF(current);
        return here;
    }
    return 1;
}

/* ----------------------------------------------------------------------------------------------------------- playing */
static PyObject *number(const Call *call, const Known *known, Py_ssize_t place) {
    return place < known->count ? known->numbers[place] : PyTuple_GET_ITEM(call->constants, place - known->count);
}

static PyObject *numbers(const Call *call, const Known *known, PyObject *places) {
    PyObject *chosen = PyTuple_New(PyTuple_GET_SIZE(places));
    for (Py_ssize_t i = 0; chosen && i < PyTuple_GET_SIZE(places); i++)
        PyTuple_SET_ITEM(chosen, i, Py_NewRef(number(call, known, PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i)))));
    return chosen;
}

static int run(Call *call, const Known *known) {
    PyObject *sources = numbers(call, known, call->sources), *outputs = numbers(call, known, call->outputs);
    PyObject *result = NULL, *args[] = {sources, outputs, Py_None, number(call, known, call->initial)};
    if (sources && outputs)
        result = PyObject_Vectorcall(call->run, args, 4, NULL);
    Py_XDECREF(sources);
    Py_XDECREF(outputs);
    Py_XDECREF(result);
    return result ? 1 : -1;
}

/* On a GPU the kernel, on a CPU the compiled loop in this thread; 0 where that is not possible here. */
static int launch(Call *call, Known *known) {
    uint64_t values[PARAMETERS];
    void *parameters[PARAMETERS], *stream = NULL;
    int status = 0, on_gpu = call->threads > 0;
    if (call->meeting != Py_None && !add(known, PyObject_CallNoArgs(call->meeting)))
        return -1;
    if (on_gpu) {
        PyObject *number = PyObject_CallOneArg(current_stream, call->device);
        if (!number)
            return -1;
        stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
        Py_DECREF(number);
        if (PyErr_Occurred())
            return -1;
    }
    memcpy(values, call->values, (size_t)call->parameters * sizeof *values);
    for (int i = 0; i < call->slots; i++) {
        int place = call->slot[i].place;
        values[call->slot[i].parameter] = known->pointers[place < 0 ? known->count - 1 : place];
    }
    for (int i = 0; i < call->parameters; i++)
        parameters[i] = &values[i];
    Py_BEGIN_ALLOW_THREADS
    if (on_gpu)
        status = launch_kernel(call->function, call->grid[0], call->grid[1], call->grid[2], call->threads, 1, 1,
                               call->shared, stream, parameters, NULL);
    else
        ((Loop)(uintptr_t)call->function)((int64_t)(intptr_t)values);
    Py_END_ALLOW_THREADS
    if (status == NO_CONTEXT) /* a new thread, which Triton's own way gives one */
        return 0;
    if (status) {
        const char *text = NULL;
        error_string(status, &text);
        PyErr_Format(PyExc_RuntimeError, "Launching a kernel: %s (CUDA error %d).", text ? text : "unknown", status);
        return -1;
    }
    return 1;
}

static PyObject *play(Call *call, Known *known) {
    for (Py_ssize_t i = 0; i < call->made; i++) {
        PyObject *recipe = PyTuple_GET_ITEM(call->making, i);
        PyObject **entries = ((PyTupleObject *)recipe)->ob_item;
        size_t count = (size_t)PyTuple_GET_SIZE(recipe) - 1;
        if (!add(known, PyObject_Vectorcall(entries[0], entries + 1, count, NULL)))
            return NULL;
    }
    int done = call->run ? run(call, known) : launch(call, known);
    if (done < 0)
        return NULL;
    if (!done)
        Py_RETURN_NONE;
    Py_ssize_t count = PyTuple_GET_SIZE(call->overwritten);
    if (count) {
        PyObject *tensors = PyList_New(count);
        if (!tensors)
            return NULL;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *tensor = known->tensors[PyLong_AsLong(PyTuple_GET_ITEM(call->overwritten, i))];
            PyList_SET_ITEM(tensors, i, Py_NewRef(tensor));
        }
        PyObject *result = PyObject_CallOneArg(increment_version, tensors);
        Py_DECREF(tensors);
        if (!result)
            return NULL;
        Py_DECREF(result);
    }
    count = PyTuple_GET_SIZE(call->returned);
    if (call->single)
        return Py_NewRef(known->tensors[PyLong_AsLong(PyTuple_GET_ITEM(call->returned, 0))]);
    PyObject *results = PyTuple_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++)
        PyTuple_SET_ITEM(results, i, Py_NewRef(known->tensors[PyLong_AsLong(PyTuple_GET_ITEM(call->returned, i))]));
    return results;
}

static PyObject *recall(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "recall(calls: list, args: tuple, kwargs: dict | None)");
        return NULL;
    }
    PyObject *calls = args[0];
    Arguments flat;
    if (!PyList_GET_SIZE(calls) || !flatten(&flat, args[1], args[2]))
        Py_RETURN_NONE;
    int no = followed();
    if (no)
        return no < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *grad = PyObject_CallNoArgs(grad_enabled);
    if (!grad)
        return NULL;
    Py_DECREF(grad); /* a bool lives on */
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(calls); i++) {
        Call *call = (Call *)PyList_GET_ITEM(calls, i);
        if (call->grad != grad)
            continue;
        Known known = {.count = 0};
        Py_INCREF(call); /* another thread may drop it */
        int fit = fits(call, &flat, &known);
        PyObject *result = NULL;
        if (fit > 0) {
            if (i < PyList_GET_SIZE(calls) && PyList_GET_ITEM(calls, i) == (PyObject *)call) {
                for (Py_ssize_t j = i; j > 0; j--) /* each moves on by a place, the counts stay */
                    PyList_SET_ITEM(calls, j, PyList_GET_ITEM(calls, j - 1));
                PyList_SET_ITEM(calls, 0, (PyObject *)call);
            }
            result = play(call, &known);
        }
        forget(&known);
        Py_DECREF(call);
        if (fit)
            return result;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, NULL},
    {"recall", (PyCFunction)(void (*)(void))recall, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "rl_triton_td_replay", NULL, -1, methods};

PyMODINIT_FUNC PyInit_rl_triton_td_replay(void) {
    PyObject *made = PyType_Ready(&CallType) < 0 ? NULL : PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Call", (PyObject *)&CallType) < 0)
        Py_CLEAR(made);
    return made;
}
