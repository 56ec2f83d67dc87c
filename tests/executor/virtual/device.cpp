// A device for tests, in CUDA's place in a torch that is built without CUDA: tensors that are not the host's, streams,
// events, an allocator, pinned memory, and autograd in a thread of its own, while every kernel is the CPU's and has run
// when its launch returns. What `observer` is told are the promises that streams make or do not make; races.py judges.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace {

const c10::Device device(c10::DeviceType::CUDA, 0);
const c10::DispatchKey key = c10::DispatchKey::CUDA;

PyObject* observer = nullptr;  // never freed: tensors may outlive the interpreter
std::atomic<bool> observed{false};

template <typename... Args>
void tell(const char* method, Args&&... args) {
  if (!observed.load() || !Py_IsInitialized()) {
    return;
  }
  py::gil_scoped_acquire gil;
  // What Python raises here would be lost in destructors, so the observer keeps what it finds.
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  py::handle(observer).attr(method)(std::forward<Args>(args)...);
  PyErr_Restore(kind, value, trace);
}

// Memory.

thread_local int64_t current_stream = 0;
std::atomic<int64_t> num_streams{1};

#include "pools.h"

struct Block {
  at::Storage storage;  // of the CPU, if a kernel made it
  void* data;
  int64_t num_bytes;
  Piece* piece;
  std::atomic<bool> shared{false};  // with another stream than its own
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->num_bytes) {
    tell("freed", reinterpret_cast<int64_t>(block->data));
    pools.give(block->piece, block->shared);
  }
  if (!block->storage) {
    std::free(block->data);
  }
  delete block;
}

c10::DataPtr owned(at::Storage storage, void* data, int64_t num_bytes, Piece* piece) {
  if (num_bytes) {
    tell("allocated", reinterpret_cast<int64_t>(data), num_bytes, current_stream);
  }
  return {data, new Block{std::move(storage), data, num_bytes, piece}, &release, device};
}

// Another stream uses it: it is not free before the host has waited.
void share(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get_deleter() == &release) {
    auto* block = static_cast<Block*>(data.get_context());
    if (block->piece && block->piece->pool.first != stream.id()) {
      block->shared = true;
    }
  }
  tell("kept_for", reinterpret_cast<int64_t>(data.get()), stream.id());
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* piece = num_bytes ? pools.take(static_cast<int64_t>(num_bytes)) : nullptr;
    void* data = num_bytes ? std::aligned_alloc(512, (num_bytes + 511) / 512 * 512) : nullptr;
    return owned({}, data, static_cast<int64_t>(num_bytes), piece);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &allocator);

// Streams and events.

void wait_for_all() {
  pools.settle();
  tell("waited_for_all");
}

struct Event {
  int64_t id;
  std::chrono::steady_clock::time_point time;
};
std::atomic<int64_t> num_events{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(num_streams++); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(num_streams++); }
  c10::Stream exchangeStream(c10::Stream given) const override {
    return stream(std::exchange(current_stream, given.id()));
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new Event{num_events++, {}};
    }
    auto* mine = static_cast<Event*>(*event);
    mine->time = std::chrono::steady_clock::now();
    tell("recorded", mine->id, on.id());
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) {
      tell("followed", static_cast<Event*>(event)->id, on.id());
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);  // who asks, knows
    return true;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override {
    pools.settle();
    if (event) {
      tell("waited", static_cast<Event*>(event)->id);
    }
  }
  void synchronizeStream(const c10::Stream& on) const override {
    pools.settle();
    tell("waited_for_stream", on.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override { share(data, on); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(second)->time - static_cast<Event*>(first)->time)
        .count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Host memory that copies are asynchronous from and to.

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

bool is_pinned(const void* data) {
  const std::lock_guard lock(pinned_mutex);
  auto next = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
  return next != pinned.begin() && reinterpret_cast<uintptr_t>(data) < std::prev(next)->first + std::prev(next)->second;
}

struct PinnedAllocator final : c10::Allocator {
  static void release(void* data) {
    {
      const std::lock_guard lock(pinned_mutex);
      pinned.erase(reinterpret_cast<uintptr_t>(data));
    }
    std::free(data);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes ? std::aligned_alloc(512, (num_bytes + 511) / 512 * 512) : nullptr;
    const std::lock_guard lock(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(data)] = num_bytes;
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};
PinnedAllocator pinned_allocator;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { wait_for_all(); }
  long versionCuDNN() const override { return 0; }
};

// torch has made its hooks by the time that this is loaded, and asks no registry again. They have no members, so these
// can be put into their place.
void put_hooks_in_place() {
  static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) CUDAHooks({});
}

// Kernels.

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == device.type(); }

using Range = std::tuple<int64_t, int64_t, bool>;  // address, bytes, whether it is written

Range range_of(const at::Tensor& tensor, bool writes) {
  int64_t last = 0;
  for (const auto i : c10::irange(tensor.dim())) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto start = reinterpret_cast<int64_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {start, tensor.numel() ? (last + 1) * static_cast<int64_t>(tensor.itemsize()) : 0, writes};
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (!tensor.numel()) {  // kernels may make it larger, which what is borrowed cannot be
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto* data = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

at::Tensor make(c10::Storage storage, const caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
}

at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) {
    return tensor;
  }
  auto whole = tensor.storage();
  auto* data = whole.mutable_data();
  const auto num_bytes = static_cast<int64_t>(whole.nbytes());
  auto* piece = num_bytes ? pools.take(num_bytes) : nullptr;
  auto made = make(
      c10::Storage(c10::Storage::use_byte_size_t(), num_bytes, owned(whole, data, num_bytes, piece), &allocator, true),
      tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

// The host waits for these on any device, as it needs what they find.
const std::set<std::string> waiting = {"aten::nonzero", "aten::_unique2", "aten::masked_select", "aten::equal"};

// These take places or lengths from the host. All others take from there numbers without dimensions alone, on any device.
const std::set<std::string> lenient = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                       "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const bool strict = !lenient.count(schema.name());
  const auto begin = stack->size() - schema.arguments().size();
  std::vector<at::Tensor> given(schema.arguments().size()), lent(schema.arguments().size());
  std::vector<Range> ranges;
  const auto lend = [&](const at::Tensor& tensor, bool writes) {
    if (is_ours(tensor)) {
      ranges.push_back(range_of(tensor, writes));
    } else if (strict && tensor.defined() && (tensor.dim() || writes)) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", schema.name(), " of cuda:0 has one of cpu");
    }
    return on_host(tensor);
  };
  for (const auto i : c10::irange(schema.arguments().size())) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      given[i] = value.toTensor();
      lent[i] = lend(given[i], writes);
      value = lent[i];
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(lend(tensor, writes));
      }
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::make_optional(lend(*tensor, writes)) : tensor);
      }
      value = std::move(tensors);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const auto i : c10::irange(given.size())) {
    if (is_ours(given[i]) && lent[i].sizes() != given[i].sizes()) {  // out= of another size
      given[i].resize_(lent[i].sizes());
      on_host(given[i]).copy_(lent[i]);
    }
  }
  const auto first = stack->size() - schema.returns().size();
  for (const auto i : c10::irange(schema.returns().size())) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      if (!alias) {
        auto made = on_device(tensor);
        if (is_ours(made)) {
          ranges.push_back(range_of(made, true));
        }
        value = std::move(made);
        continue;
      }
      for (const auto j : c10::irange(given.size())) {
        const auto* theirs = schema.arguments()[j].alias_info();
        if (theirs && is_ours(given[j]) && theirs->beforeSets() == alias->beforeSets()) {
          const auto shift = static_cast<char*>(tensor.data_ptr()) - static_cast<char*>(lent[j].data_ptr());
          value = alias->isWrite() ? given[j]
                                   : at::native::as_strided_tensorimpl(
                                         given[j], tensor.sizes(), tensor.strides(),
                                         given[j].storage_offset() + shift / static_cast<int64_t>(tensor.itemsize()));
        }
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(on_device(tensor));
        ranges.push_back(range_of(tensors.get(tensors.size() - 1), true));
      }
      value = std::move(tensors);
    }
  }
  tell("launched", schema.name(), current_stream, ranges);
  if (waiting.count(schema.name())) {
    tell("waited_for_stream", current_stream);
  }
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  auto made = on_device(on_host(self).to(at::kFloat).histc(bins, min, max).to(self.scalar_type()));  // not on CPUs
  tell("launched", "histc", current_stream, std::vector<Range>{range_of(self, false), range_of(made, true)});
  return made;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  const auto num_bytes = c10::multiply_integers(size) * static_cast<int64_t>(type.itemsize());
  auto made = make(
      c10::Storage(c10::Storage::use_byte_size_t(), num_bytes, allocator.allocate(num_bytes), &allocator, true), type);
  made.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return made;
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  int64_t count = c10::multiply_integers(size) ? 1 : 0;
  for (const auto i : c10::irange(size.size())) {
    count += count ? (size[i] - 1) * stride[i] : 0;
  }
  auto made = empty({count}, dtype, {}, {}, {}, {});
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  std::vector<Range> ranges = {range_of(from, false), range_of(to, true)};
  on_host(to).copy_(on_host(from));
  tell("launched", "copy", current_stream, ranges);
  const at::Tensor& other = is_ours(from) ? to : from;
  if (!is_ours(other)) {
    const bool asynchronous = non_blocking && is_pinned(other.storage().data());
    if (!asynchronous) {
      tell("waited_for_stream", current_stream);
    }
    tell("crossed", non_blocking, asynchronous, other.nbytes());
  }
  return to;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride.empty() && !size.empty() ? at::detail::defaultStrides(size) : stride.vec());
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  tell("launched", "item", current_stream, std::vector<Range>{range_of(self, false)});
  tell("waited_for_stream", current_stream);
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed = static_cast<size_t>(c10::multiply_integers(size)) * self.itemsize();
  if (self.storage().nbytes() < needed) {
    self.storage().set_data_ptr(allocator.allocate(needed));
    self.storage().set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) { share(self.storage().data_ptr(), stream); }

#include "attention.h"

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("histc", &histc);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("_scaled_dot_product_flash_attention", &flash_attention);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_attention_backward);
  m.impl("_scaled_dot_product_cudnn_attention", &cudnn_attention);
  m.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_attention_backward);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// Operators of one kernel on CPUs, as on CUDA, for which any other device runs several operators: a fallback comes after
// these. Their memory would be another.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && name.getNamespace() == "aten" && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
        !op->hasKernelForDispatchKey(key)) {
      const auto whole = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(whole.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  put_hooks_in_place();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fused_choice);
  m.def("synchronize", &wait_for_all);
  m.def("observe", [](py::object given) {
    Py_XDECREF(observer);
    observer = given.is_none() ? nullptr : given.release().ptr();
    observed = observer != nullptr;
  });
  m.def("on_host", &on_host, "Return a tensor of the host that is the same memory.");
  m.def("set_memory", [](int64_t capacity, bool expandable) {
    pools.empty();
    pools.capacity = capacity, pools.expandable = expandable;
  });
  m.def("memory_stats", [] {
    const std::lock_guard lock(pools.mutex);
    return std::map<std::string, int64_t>{
        {"active_bytes.all.current", pools.active},       {"active_bytes.all.peak", pools.active_peak},
        {"reserved_bytes.all.current", pools.reserved},   {"reserved_bytes.all.peak", pools.reserved_peak},
        {"inactive_split_bytes.all.peak", pools.split_peak},
        {"num_alloc_retries", pools.num_retries},         {"num_ooms", pools.num_ooms}};
  });
  m.def("empty_cache", [] { pools.empty(); });
  m.def("reset_peaks", [] { pools.reset_peaks(); });
  // Not told while the mutex is held: Python may collect garbage then, and unpin.
  m.def("pin", [](uintptr_t data, size_t num_bytes) {
    {
      const std::lock_guard lock(pinned_mutex);
      pinned[data] = num_bytes;
    }
    tell("pinned", data, num_bytes);
  });
  m.def("unpin", [](uintptr_t data) {
    {
      const std::lock_guard lock(pinned_mutex);
      pinned.erase(data);
    }
    tell("unpinned", data);
  });
}
