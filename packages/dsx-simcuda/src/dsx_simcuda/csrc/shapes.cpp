// Shapes that torch's meta kernels have given, kept for calls that are alike. Most meta kernels are Python functions of
// a tenth of a millisecond, several times the operator itself on small tensors; a training step asks the same again.
//
// A result's shape, strides and dtype follow from those of the arguments, from the values of the others (numbers,
// lists, texts) and from torch's default dtype. All of these are in the key, but the floating-point numbers beside a
// first tensor: an optimizer's change with each step, and no shape follows from them. Not kept: calls with other
// arguments than these, results that are no plain tensors, outputs (out=) that got another size, and operators whose
// results depend on values, which are never asked.
#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "device.h"

namespace sim {
namespace {

constexpr size_t MOST = 1 << 16;  // calls that are kept; a program with changing shapes starts again then

// One tensor of a result.
struct Form {
    bool defined;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
};

// A result: one tensor, or a list.
struct Result {
    bool list;
    std::vector<Form> tensors;
};

std::mutex shapes_mutex;
std::unordered_map<std::string, std::vector<Result>> shapes;

// The bytes that tell calls apart.
class Key {
  public:
    std::string bytes;

    template <class T> void add(const T& value) {
        static_assert(std::is_trivially_copyable_v<T>);
        bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    }

    template <class List> void add_all(char kind, const List& values) {
        add(kind);
        add(size_t(values.size()));
        for (const auto& value : values) add(value);
    }

    // False: nothing can be said of calls with such an argument. `floats`: their values matter.
    bool add_argument(const c10::IValue& v, bool floats) {
        if (v.isTensor()) return add_tensor(v.toTensor());
        if (v.isTensorList()) {
            auto tensors = v.toTensorVector();
            add('L');
            add(tensors.size());
            return std::all_of(tensors.begin(), tensors.end(), [this](const at::Tensor& t) { return add_tensor(t); });
        }
        if (v.isOptionalTensorList()) {
            auto tensors = v.toOptionalTensorVector();
            add('O');
            add(tensors.size());
            return std::all_of(tensors.begin(), tensors.end(),
                               [this](const auto& t) { return add_tensor(t.value_or(at::Tensor())); });
        }
        if (v.isNone()) add('N');
        else if (v.isBool()) add('b'), add(v.toBool());
        else if (v.isInt()) add('i'), add(v.toInt());
        else if (v.isDouble()) add('d'), add(floats ? v.toDouble() : 0.0);
        else if (v.isComplexDouble()) add('c'), add(v.toComplexDouble());
        else if (v.isIntList()) add_all('I', v.toIntVector());
        else if (v.isDoubleList()) add_all('D', v.toDoubleVector());
        else if (v.isBoolList()) add_list_of_bools(v.toBoolList());
        else if (v.isString()) add_all('s', v.toStringRef());
        else if (v.isDevice()) add('v'), add(v.toDevice().type()), add(v.toDevice().index());
        else return false;
        return true;
    }

  private:
    void add_list_of_bools(const c10::List<bool>& values) {
        add('B');
        add(size_t(values.size()));
        for (bool value : values) add(value);
    }

    bool add_tensor(const at::Tensor& t) {
        if (!t.defined()) {
            add('u');
            return true;
        }
        if (t.layout() != at::kStrided || t.is_conj() || t.is_neg() || t.is_quantized()) return false;
        // a number of Python has another weight in the choice of a dtype than a tensor without dimensions
        add(t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 't');
        add(t.scalar_type());
        add(t.device().type());
        add_all('S', t.sizes());
        add_all('T', t.strides());
        return true;
    }
};

bool plain(const at::Tensor& t) {
    return !t.defined() || (t.is_meta() && t.layout() == at::kStrided && !t.is_conj() && !t.is_neg());
}

Form form_of(const at::Tensor& t) {
    if (!t.defined()) return {false, at::kFloat, {}, {}};
    return {true, t.scalar_type(), t.sizes().vec(), t.strides().vec()};
}

at::Tensor made(const Form& form) {
    if (!form.defined) return {};
    return at::detail::empty_strided_meta(form.sizes, form.strides, form.dtype);
}

}  // namespace

std::optional<std::string> key_of_shapes(const c10::OperatorHandle& op, const torch::jit::Stack& meta) {
    Key key;
    key.add(&op.schema());
    key.add(at::get_default_dtype_as_scalartype());
    bool on_tensors = !meta.empty() && (meta[0].isTensor() || meta[0].isTensorList());
    bool floats = !on_tensors || op.schema().name().find("upsample") != std::string::npos;  // scales of an image
    for (const c10::IValue& v : meta)
        if (!key.add_argument(v, floats)) return std::nullopt;
    return std::move(key.bytes);
}

bool find_shapes(const std::string& key, torch::jit::Stack& results) {
    std::lock_guard lock(shapes_mutex);
    auto found = shapes.find(key);
    if (found == shapes.end()) return false;
    for (const Result& result : found->second) {
        if (!result.list) {
            results.emplace_back(made(result.tensors[0]));
            continue;
        }
        c10::List<at::Tensor> list;
        for (const Form& form : result.tensors) list.push_back(made(form));
        results.emplace_back(list);
    }
    return true;
}

void keep_shapes(const std::string& key, const torch::jit::Stack& results) {
    std::vector<Result> kept;
    for (const c10::IValue& v : results) {
        if (!v.isTensor() && !v.isTensorList()) return;
        auto tensors = v.isTensor() ? std::vector<at::Tensor>{v.toTensor()} : v.toTensorVector();
        if (!std::all_of(tensors.begin(), tensors.end(), plain)) return;
        kept.push_back({v.isTensorList(), {}});
        for (const at::Tensor& t : tensors) kept.back().tensors.push_back(form_of(t));
    }
    std::lock_guard lock(shapes_mutex);
    if (shapes.size() >= MOST) shapes.clear();
    shapes.emplace(key, std::move(kept));
}

}  // namespace sim
