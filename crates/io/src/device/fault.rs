//! Reasons why a device cannot be used.

use std::fmt;
use std::io;

use ingot_format::Escaped;

use crate::options::PINNED_VARIABLE;

/// A fault of a device, or of its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceFault {
    /// There is no driver.
    NoDriver {
        /// The system's error.
        reason: String,
    },
    /// The driver lacks a function: it is too old, or another library with its name.
    Symbol {
        /// The function.
        symbol: &'static str,
    },
    /// This process is the child of one that used the driver.
    Forked,
    /// The caller's stream is being recorded into a graph.
    Capturing,
    /// The caller stopped the call while it waited for a device.
    Interrupted,
    /// The system has no memory for the ring.
    HostMemory {
        /// The bytes that were requested.
        nbytes: usize,
        /// The system's error.
        reason: String,
    },
    /// The environment variable for the number of pinned bytes is not a number.
    Pinned {
        /// The value of the variable.
        found: String,
    },
    /// A function of the driver failed.
    Call {
        /// The function.
        call: &'static str,
        /// The code that the function returned.
        code: i32,
        /// The driver's name for the code.
        name: String,
        /// The driver's text.
        text: String,
    },
}

/// Codes that every later call returns until the process ends, with the ranges in the driver's documentation.
fn is_sticky(code: i32) -> bool {
    matches!(code, 214 | 700 | 702 | 710 | 714..=719)
}

impl DeviceFault {
    /// Returns the remedy.
    fn hint(&self) -> Option<&'static str> {
        match self {
            DeviceFault::NoDriver { .. } => Some("is a driver installed, and visible in this container?"),
            DeviceFault::Symbol { .. } => Some("a driver of CUDA 11 or newer has it"),
            DeviceFault::Forked => Some("start workers by `spawn` or `forkserver`"),
            DeviceFault::Capturing => Some("load before the capture begins"),
            DeviceFault::Interrupted | DeviceFault::HostMemory { .. } | DeviceFault::Pinned { .. } => None,
            DeviceFault::Call { code, .. } if is_sticky(*code) => Some(
                "an earlier operation on this device failed, and every later one says so until the process ends",
            ),
            DeviceFault::Call {
                call: "cuEventRecord",
                code: 400,
                ..
            } => Some(
                "the current stream belongs to another context, such as a green context: load on a stream of the primary context",
            ),
            DeviceFault::Call { code, .. } => match code {
                100 => Some("no device is visible: see CUDA_VISIBLE_DEVICES"),
                101 => Some("the number of the device is that among the visible ones"),
                34 => Some("a stub of the toolkit was found before the driver's own library"),
                35 | 803 => Some("the driver is older than the library"),
                _ => None,
            },
        }
    }

    /// Return whether the device is lost to this process.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, DeviceFault::Forked)
            || matches!(self, DeviceFault::Call { code, .. } if is_sticky(*code))
    }

    /// Return whether the context of the device is gone, as `cudaDeviceReset` leaves it: a new one can be opened.
    pub(crate) fn is_reset(&self) -> bool {
        matches!(
            self,
            DeviceFault::Call {
                code: 4 | 201 | 400 | 709,
                ..
            }
        )
    }

    /// Return whether memory was not pinned, on a device that can still be used. The codes differ between systems: 304 in some
    /// containers, 801 where it is not supported.
    pub(crate) fn is_unpinned(&self) -> bool {
        !self.is_lost()
            && matches!(
                self,
                DeviceFault::Call {
                    call: "cuMemHostAlloc" | "cuMemHostRegister_v2",
                    ..
                }
            )
    }

    /// The code in kebab-case.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            DeviceFault::NoDriver { .. } | DeviceFault::Symbol { .. } => "no-driver",
            DeviceFault::Forked => "device-forked",
            DeviceFault::Capturing => "device-capturing",
            DeviceFault::Interrupted => "interrupted",
            DeviceFault::Pinned { .. } => "invalid-pinned",
            DeviceFault::HostMemory { .. } => "out-of-memory",
            DeviceFault::Call { code: 2, .. } => "device-out-of-memory",
            DeviceFault::Call { .. } => "device",
        }
    }
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceFault::NoDriver { reason } => write!(f, "no driver was found: {reason}")?,
            DeviceFault::Symbol { symbol } => write!(f, "the driver has no `{symbol}`")?,
            DeviceFault::Forked => f.write_str("the driver cannot be used in the child of a fork")?,
            DeviceFault::Capturing => f.write_str("the current stream is being captured into a graph")?,
            DeviceFault::Interrupted => f.write_str("interrupted")?,
            DeviceFault::HostMemory { nbytes, reason } => {
                write!(f, "there are no {nbytes} bytes of memory for copies: {reason}")?;
            }
            DeviceFault::Pinned { found } => write!(
                f,
                "{PINNED_VARIABLE} must be a number of bytes, found {:?}",
                Escaped(found).to_string()
            )?,
            DeviceFault::Call {
                call,
                code,
                name,
                text,
            } => write!(f, "{call} gave {name} ({code}): {text}")?,
        }
        match self.hint() {
            Some(hint) => write!(f, " — {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for DeviceFault {}

impl From<DeviceFault> for io::Error {
    /// For errors of reads.
    fn from(fault: DeviceFault) -> io::Error {
        io::Error::other(fault)
    }
}
