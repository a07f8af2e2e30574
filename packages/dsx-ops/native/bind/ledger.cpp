// Addresses of many tensors, read and checked in one call, instead of asking each of them in Python for one attribute
// after the other.
//
// Tensors are looked at through DLPack's table of C functions, which torch.Tensor offers as
// `__dlpack_c_exchange_api__`: no header of torch, nothing known of its classes. The first two structs below are those
// of that standard (dlpack.h, version 1.3).
//
// The step before has swept the caches, so that looking means waiting for memory, a few lines per tensor. A ledger
// remembers where things lay the last time and asks for them some rows ahead. An address that is no longer anything
// does no harm: it is a hint, never read.
#include "work.h"

namespace dsx {
namespace {

struct DLTensor {
    void* data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct DLPackExchangeAPI {
    uint32_t major, minor;
    void *older, *allocator, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void* object,
                              DLTensor* out);  // borrows; sets a Python error and returns -1 when it cannot
    void* current_stream;
};
constexpr int32_t DLPACK_CPU = 1;
constexpr size_t AHEAD = 8;  // rows

const DLPackExchangeAPI* exchange_of(const py::capsule& capsule) {
    const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) throw py::error_already_set();
    if (api->major != 1 || !api->tensor_from_object)
        throw std::invalid_argument("expected DLPack's exchange functions, version 1");
    return api;
}

bool contiguous(const DLTensor& t) {
    int64_t expected = 1;
    for (int32_t d = t.ndim - 1; t.strides && d >= 0; --d) {
        if (t.shape[d] != 1 && t.strides[d] != expected) return false;
        expected *= t.shape[d];
    }
    return true;
}

// One column of a table of rows: where its tensors are found, and of which dtype they must be.
struct Column {
    size_t index;
    py::object key;  // in the state of a parameter
    uint8_t code, bits;
};

class Ledger {
  public:
    // `sizes`: like the table, how many elements each tensor must have. `columns`: (index, key, DLPack's type code,
    // bits); the first two are parameter and gradient.
    Ledger(const py::capsule& exchange, const std::vector<std::tuple<size_t, py::object, int, int>>& columns,
           const py::buffer& sizes_buffer)
        : api_(exchange_of(exchange)) {
        const Int64Table sizes(sizes_buffer, STEP_COLUMNS);
        if (columns.size() < 2) throw std::invalid_argument("expected columns of parameters and gradients");
        for (const auto& [index, key, code, bits] : columns) {
            if (index >= STEP_COLUMNS) throw std::invalid_argument("no such column");
            columns_.push_back(Column{index, key, static_cast<uint8_t>(code), static_cast<uint8_t>(bits)});
        }
        sizes_.assign(sizes.data, sizes.data + sizes.rows * STEP_COLUMNS);
        seen_.resize(sizes.rows * columns_.size());
    }

    // The table gets the addresses of today's tensors. False, and the table is of no use, when one of them is not as it
    // should be: the caller finds out which, and names it.
    bool read(const py::list& params, const py::list& states, long long step, const py::buffer& table_buffer) {
        const Int64Table table(table_buffer, STEP_COLUMNS);
        const size_t rows = sizes_.size() / STEP_COLUMNS;
        if (table.info.readonly || table.rows != rows || params.size() != rows || states.size() != rows)
            throw std::invalid_argument("expected one row per parameter");
        for (size_t row = 0; row < rows; ++row) {
            if (row + AHEAD < rows) prefetch(row + AHEAD);
            if (!read_row(PyList_GET_ITEM(params.ptr(), row), PyList_GET_ITEM(states.ptr(), row), step, row,
                          static_cast<int64_t*>(table.info.ptr))) {
                PyErr_Clear();  // of what is no tensor, or one without an address
                return false;
            }
        }
        return true;
    }

  private:
    struct Seen {
        const char *object, *shape;
    };

    void prefetch(size_t row) const {
        for (size_t i = row * columns_.size(); i < (row + 1) * columns_.size(); ++i) {
            __builtin_prefetch(seen_[i].object);
            for (int line = -64; line <= 128; line += 64)
                __builtin_prefetch(seen_[i].shape + line);  // what lies around a shape: torch's own notes of a tensor
        }
    }

    bool read_row(PyObject* param, PyObject* state, long long step, size_t row, int64_t* table) {
        const py::object grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, grad_.ptr()));
        if (!grad || !PyDict_CheckExact(state)) return false;
        PyObject* count = PyDict_GetItemWithError(state, step_.ptr());
        if (!count || !PyLong_CheckExact(count) || PyLong_AsLongLong(count) != step) return false;
        for (size_t i = 0; i < columns_.size(); ++i) {
            PyObject* object = i == 0   ? param
                               : i == 1 ? grad.ptr()
                                        : PyDict_GetItemWithError(state, columns_[i].key.ptr());
            const size_t at = row * STEP_COLUMNS + columns_[i].index;
            if (!object || !look(object, columns_[i], sizes_[at], table[at], seen_[row * columns_.size() + i]))
                return false;
        }
        return true;
    }

    // The address of `object`, when it is a contiguous tensor in host memory, of this column's dtype and `numel`
    // elements.
    bool look(PyObject* object, const Column& column, int64_t numel, int64_t& address, Seen& seen) const {
        DLTensor t;
        if (api_->tensor_from_object(object, &t) != 0) return false;
        int64_t found = 1;
        for (int32_t d = 0; d < t.ndim; ++d) found *= t.shape[d];
        if (t.device_type != DLPACK_CPU || t.code != column.code || t.bits != column.bits || t.lanes != 1 ||
            found != numel)
            return false;
        if (numel > 0 && (!t.data || !contiguous(t))) return false;
        seen = Seen{reinterpret_cast<const char*>(object), reinterpret_cast<const char*>(t.shape)};
        address = reinterpret_cast<int64_t>(t.data) + static_cast<int64_t>(t.byte_offset);
        return true;
    }

    const DLPackExchangeAPI* api_;
    py::str grad_{"grad"}, step_{"step"};
    std::vector<Column> columns_;
    std::vector<int64_t> sizes_;
    std::vector<Seen> seen_;
};

}  // namespace

void bind_ledger(py::module_& m) {
    py::class_<Ledger>(m, "Ledger", py::module_local())
        .def(py::init<const py::capsule&, const std::vector<std::tuple<size_t, py::object, int, int>>&,
                      const py::buffer&>())
        .def("read", &Ledger::read);
}

}  // namespace dsx
