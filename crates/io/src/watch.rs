//! How a caller stops something that takes long.

/// Asked now and then, on the thread that made the call, whether to go on.
pub trait Watch: Sync {
    /// Whether to stop. Asked at least every 100 ms.
    fn interrupted(&self) -> bool {
        false
    }
}

/// Never stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Watch for Unwatched {}
