// The functions of a transformer layer, and token gather and scatter, for Python.
#include "work.h"

namespace dsx {

void bind_rows(py::module_&) {}

}  // namespace dsx
