// PyTorch asks every device which one is current; a build for CPUs has no answer for CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct OneDevice : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kCuda, 0); }
};

OneDevice one_device;
[[maybe_unused]] const bool is_registered =
    (c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&one_device), true);

}  // namespace
