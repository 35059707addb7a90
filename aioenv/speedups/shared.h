/* Constants, fields of tuples and attributes that C shares with Python.
 * Written by tests/tools/speedups_header.py; don't edit. */

#pragma once

#define MAGIC_BYTES 0xa1, 0x0e
enum {
    HEADER_BYTES = 28,
    AT_VERSION = 2,
    AT_KIND = 3,
    AT_REQUEST = 4,
    AT_GENERATION = 8,
    AT_FIXED = 12,
    AT_PAYLOAD = 16,
    AT_BODY_CRC = 20,
    AT_CRC = 24,
    VERSION = 1,
    KIND_STEP = 5,
    KIND_RESULT = 8,
    RUN_TAG = 82,
    RUN_BYTES = 9,
    COLUMNS_TAG = 73,
    COLUMNS_HEAD = 5,
    GROUP_HEAD = 16,
};
#define MAX_FIXED ((Py_ssize_t)2147483648)
#define MAX_PAYLOAD ((Py_ssize_t)1073741824)

/* Fields of named tuples. */
enum { FAST_PATH_VIEWS, FAST_PATH_ACTIONS, FAST_PATH_STEPS, FAST_PATH_RESETS, FAST_PATH_PENDING_RESET, FAST_PATH_SEEDS, FAST_PATH_AT_END, FAST_PATH_CURRENT_ROW, FAST_PATH_INTO, FAST_PATH_FIXED_OF, FAST_PATH_SCHEMAS, FAST_PATH_FIXED, FAST_PATH_WRITE_EXTRAS, FAST_PATH_FIELDS }; /* aioenv.worker.service.FastPath */
enum { PENDING_INTO, PENDING_ON_REPLY, PENDING_FAST_PATH, PENDING_FIELDS }; /* aioenv.process.connection.PendingReply */
enum { FAST_REPLY_PART, FAST_REPLY_WHOLE, FAST_REPLY_READ, FAST_REPLY_ALWAYS, FAST_REPLY_FIELDS }; /* aioenv.process.connection.FastReply */
enum { COLUMNS_POSITIONS, COLUMNS_SCHEMA, COLUMNS_VALUES, COLUMNS_FIELDS }; /* aioenv.spaces.infos.Columns */
enum { SCHEMA_COLUMNS, SCHEMA_FLOATS, SCHEMA_BY_ROW, SCHEMA_FIELDS }; /* aioenv.spaces.infos.Schema */
enum { COLUMN_PATH, COLUMN_DTYPE, COLUMN_SHAPE, COLUMN_IS_DICT, COLUMN_IS_PYTHON, COLUMN_AS_OBJECTS, COLUMN_FIELDS }; /* aioenv.spaces.infos.Column */
enum { KNOWN_SCHEMA_ID, KNOWN_KEYS, KNOWN_TYPES, KNOWN_TEMPLATES, KNOWN_MAKE_INFO, KNOWN_FIELDS }; /* aioenv.spaces.infos.NumericSchema */
enum { NAME_KEY, NAME_MASK_KEY, NAME_DTYPE, NAME_SHAPE, NAME_FIELDS }; /* aioenv.spaces.infos.ColumnName */

/* Attributes (see speedups/__init__.py). */
#define NAMES(name) \
    name(_elapsed_steps) \
    name(_head) \
    name(_header) \
    name(_max_episode_steps) \
    name(_schemas) \
    name(_spill) \
    name(_wanted) \
    name(abandoned) \
    name(arrived) \
    name(astype) \
    name(chain) \
    name(copy) \
    name(decoder) \
    name(done) \
    name(encoder) \
    name(env) \
    name(error) \
    name(fast_channel) \
    name(fast_reply) \
    name(fd) \
    name(feed) \
    name(final_info) \
    name(final_obs) \
    name(frames) \
    name(generation) \
    name(itemsize) \
    name(member) \
    name(next_id) \
    name(open) \
    name(pending) \
    name(request_id) \
    name(requests) \
    name(schemas) \
    name(send_later) \
    name(set_result) \
    name(slots) \
    name(start) \
    name(step) \
    name(stop) \
    name(unsent) \
    name(waiting) \
    name(worker)
