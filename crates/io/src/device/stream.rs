//! A device, and the stream of the caller there.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::Path;

use super::Device;
use super::driver::Stream;
use super::fault::DeviceFault;
use super::system;

/// A device, and the caller's stream there, in whose order its memory is used.
#[derive(Clone, Debug)]
pub struct DeviceStream {
    pub(super) device: Device,
    pub(super) stream: Stream,
}

impl DeviceStream {
    /// The device of this number among the visible ones; a null `stream` is the default one. `driver` is a library that does
    /// as the driver does: for tests.
    ///
    /// # Errors
    /// There is no driver or no such device, or this is the child of a process that used one.
    ///
    /// # Safety
    /// `stream` is null, or a stream of the device's primary context that stays as long as this.
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

    /// The same device in the order of another stream of the caller's; a null `stream` is the default one.
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

    /// Has all that is copied from now on wait for what the caller has queued by now.
    ///
    /// # Errors
    /// The device fails.
    pub fn begin(&self) -> Result<(), DeviceFault> {
        self.device.gpu.wait_for(self.stream)
    }

    /// Has what the caller queues from now on wait for all that was copied.
    ///
    /// # Errors
    /// The device fails.
    pub fn hold(&self) -> Result<(), DeviceFault> {
        self.device.gpu.hold(self.stream)
    }

    /// Has memory that copies use be used by others after them only, before it is given up: in the order of the caller's
    /// stream, or, if that is not possible, by a wait.
    pub(crate) fn settle(&self) {
        let held = self.refuse_capture().and_then(|()| self.hold());
        if held.is_err() {
            // A device that is lost copies nothing any more.
            drop(self.device.finish());
        }
    }

    /// Fail if the caller's stream is being captured into a graph, since a wait would break the capture.
    ///
    /// # Errors
    /// It is; or the device fails.
    pub fn refuse_capture(&self) -> Result<(), DeviceFault> {
        self.device.gpu.refuse_capture(self.stream)
    }
}
