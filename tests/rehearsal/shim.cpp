// A CUDA device that computes nothing: what a CPU build of torch asks for before it lets autograd, autocast and fused
// optimizers run on fake CUDA tensors («not linked with support for cuda» without it).
//
// torch finds its devices through two registries. The first gets a device guard, which knows the current device and
// streams; the second gets hooks, which say that CUDA is there. Both only keep numbers.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace rehearsal {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// The devices of one host. Python changes both through the functions at the end.
DeviceIndex devices = 8;
thread_local DeviceIndex current = 0;

Device on(DeviceIndex index) {
  return Device(c10::DeviceType::CUDA, index < 0 ? current : index);
}

DeviceIndex exchange(DeviceIndex index) {
  const DeviceIndex before = current;
  if (index >= 0) {
    current = index;
  }
  return before;
}

// Autograd runs the backward of CUDA tensors in a thread of each device, under this guard.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return on(exchange(device.index())); }
  Device getDevice() const override { return on(current); }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return devices; }

  // One stream a device, always done.
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, on(device.index())); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

} // namespace rehearsal

namespace c10::impl {
using RehearsalGuard = rehearsal::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, RehearsalGuard);
} // namespace c10::impl

namespace at {

struct RehearsalHooks final : public CUDAHooksInterface {
  explicit RehearsalHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return rehearsal::devices; }
  DeviceIndex deviceCount() const override { return rehearsal::devices; }
  DeviceIndex current_device() const override { return rehearsal::current; }
  DeviceIndex getCurrentDevice() const override { return rehearsal::current; }
  void setCurrentDevice(DeviceIndex index) const override { rehearsal::exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return rehearsal::exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return rehearsal::exchange(index); }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
};

// The registry looks the class up by this name.
using CUDAHooks = RehearsalHooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", RehearsalHooks)

} // namespace at

extern "C" {
void rehearsal_set_devices(int count) { rehearsal::devices = static_cast<c10::DeviceIndex>(count); }
void rehearsal_set_current(int index) { rehearsal::current = static_cast<c10::DeviceIndex>(index); }
int rehearsal_current() { return rehearsal::current; }
}
