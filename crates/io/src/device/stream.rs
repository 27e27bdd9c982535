//! A device, and the caller's stream on it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::Path;

use super::Device;
use super::driver::Stream;
use super::fault::DeviceFault;
use super::system;

/// A device, and the caller's stream on it. The device's memory is used in the order of the stream.
#[derive(Clone, Debug)]
pub struct DeviceStream {
    pub(super) device: Device,
    pub(super) stream: Stream,
}

impl DeviceStream {
    /// Opens the device with this number among the visible ones; a null `stream` is the default stream. `driver` is a
    /// library that replaces the driver in tests.
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
        Ok(DeviceStream {
            device: system::device(ordinal, driver)?,
            stream: Stream::of_framework(stream),
        })
    }

    /// Returns the same device with another stream of the caller; a null `stream` is the default stream.
    ///
    /// # Safety
    /// As for [`DeviceStream::new`].
    #[must_use]
    pub unsafe fn beside(&self, stream: *mut c_void) -> DeviceStream {
        DeviceStream {
            device: self.device.clone(),
            stream: Stream::of_framework(stream),
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

    /// Makes all copies after this call wait for the work that the caller has queued so far.
    ///
    /// # Errors
    /// The device fails.
    pub fn begin(&self) -> Result<(), DeviceFault> {
        self.device.gpu.wait_for(self.stream)
    }

    /// Makes the work that the caller queues after this call wait for all copies so far.
    ///
    /// # Errors
    /// The device fails.
    pub fn hold(&self) -> Result<(), DeviceFault> {
        self.device.gpu.hold(self.stream)
    }

    /// Makes later users of memory wait for the copies that use it, before the memory is released: by the order of the
    /// caller's stream or, if that fails, by waiting here.
    pub(crate) fn settle(&self) {
        let held = self.refuse_capture().and_then(|()| self.hold());
        if held.is_err() {
            // A lost device has ended its copies.
            drop(self.device.finish());
        }
    }

    /// Fail if the caller's stream is being captured into a graph, since a wait would break the capture.
    ///
    /// # Errors
    /// The stream is being captured, or the device fails.
    pub fn refuse_capture(&self) -> Result<(), DeviceFault> {
        self.device.gpu.refuse_capture(self.stream)
    }
}
