// A device guard of one device and one stream that does nothing, for torch's PrivateUse1 device: the one in Python ends
// the process at an error in a backward.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using namespace c10;
constexpr auto D = DeviceType::PrivateUse1;
struct Guard final : impl::NoOpDeviceGuardImpl<D> {
  Device exchangeDevice(Device) const override { return Device(D, 0); }
  Device getDevice() const override { return Device(D, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(D, 0)); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, Device(D, 0)); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, Device(D, 0)); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, Device(D, 0)); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(const DeviceIndex) const override {}
};
} // namespace
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}
