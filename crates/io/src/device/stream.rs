//! A device, and the caller's stream on it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

use ingot_format::StopFlag;

use super::Device;
use super::copy::Copy;
use super::driver::Stream;
use super::fault::DeviceFault;
use super::gpu::{Lane, Way};
use super::ring::Lent;
use super::system;

/// A device, and the caller's stream on it. The device's memory is used in the order of the stream.
#[derive(Clone, Debug)]
pub struct DeviceStream {
    device: Device,
    stream: Stream,
    /// The stream of the copies.
    lane: Arc<Lane>,
}

impl DeviceStream {
    /// Opens the device with this number among the visible ones, to copy to it; a null `stream` is the default stream.
    /// `driver` is a library that replaces the driver in tests.
    ///
    /// # Errors
    /// There is no driver or no such device, or this is the child of a process that used one.
    ///
    /// # Safety
    /// `stream` is null, or a stream of the device's primary context that exists as long as this object.
    pub unsafe fn new(
        ordinal: i32,
        stream: *mut c_void,
        driver: Option<&Path>,
    ) -> Result<DeviceStream, DeviceFault> {
        let device = system::device(ordinal, driver)?;
        DeviceStream::of(device, Stream::of_framework(stream), Way::In)
    }

    /// The stream of a caller on `device`, for copies in this direction.
    pub(super) fn of(device: Device, stream: Stream, way: Way) -> Result<DeviceStream, DeviceFault> {
        Ok(DeviceStream {
            lane: device.gpu.lane(stream, way)?,
            device,
            stream,
        })
    }

    /// Returns the same, to copy from the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn outgoing(&self) -> Result<DeviceStream, DeviceFault> {
        DeviceStream::of(self.device.clone(), self.stream, Way::Out)
    }

    /// Returns the same device and the same copies with another stream of the caller; a null `stream` is the default
    /// stream.
    ///
    /// # Safety
    /// As for [`DeviceStream::new`].
    #[must_use]
    pub unsafe fn beside(&self, stream: *mut c_void) -> DeviceStream {
        DeviceStream {
            stream: Stream::of_framework(stream),
            ..self.clone()
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The number of the device.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.device.ordinal()
    }

    /// Return whether copies of both run on the same stream.
    pub(crate) fn is(&self, other: &DeviceStream) -> bool {
        Arc::ptr_eq(&self.lane, &other.lane)
    }

    /// Return a slot that no copy uses. Wait until there is one.
    pub(crate) fn lend(&self, stop: StopFlag<'_>) -> Result<Lent, DeviceFault> {
        self.device.ring.lend(&self.device.gpu, &self.lane, stop)
    }

    /// Return a slot that no copy uses, if there is one now.
    pub(crate) fn lend_now(&self) -> Result<Option<Lent>, DeviceFault> {
        self.device.ring.lend_now(&self.device.gpu, &self.lane)
    }

    /// Queue copies from the device to a slot.
    pub(super) fn fetch(&self, slot: &mut Lent, copies: &[Copy]) -> Result<(), DeviceFault> {
        let fetched = slot.fetch(&self.device.gpu, &self.lane, copies);
        fetched.inspect_err(|_| self.settle())
    }

    /// Makes all copies after this call wait for the work that the caller has queued so far.
    ///
    /// # Errors
    /// The device fails.
    pub fn begin(&self) -> Result<(), DeviceFault> {
        self.device.ring.try_again();
        let gpu = &self.device.gpu;
        gpu.within(|driver| self.lane.wait_for(gpu, driver, self.stream))
    }

    /// Makes the work that the caller queues after this call wait for all copies so far.
    ///
    /// # Errors
    /// The device fails.
    pub fn hold(&self) -> Result<(), DeviceFault> {
        let gpu = &self.device.gpu;
        let event = gpu.within(|driver| gpu.order(driver, self.lane.stream, self.stream))?;
        // A queued wait does not need the event any more.
        gpu.give_back(event);
        Ok(())
    }

    /// Makes later users of memory wait for the copies that use it, before the memory is released: by the order of the
    /// caller's stream or, if that fails, by waiting here.
    pub(crate) fn settle(&self) {
        let held = self.refuse_capture().and_then(|()| self.hold());
        if held.is_err() {
            // A lost device has ended its copies.
            drop(self.finish());
        }
    }

    /// Wait until all bytes have arrived.
    pub(crate) fn finish(&self) -> Result<(), DeviceFault> {
        self.device.gpu.finish(self.lane.stream)
    }

    /// Fail if the caller's stream is being captured into a graph, since a wait would break the capture.
    ///
    /// # Errors
    /// The stream is being captured, or the device fails.
    pub fn refuse_capture(&self) -> Result<(), DeviceFault> {
        self.device.gpu.refuse_capture(self.stream)
    }
}
