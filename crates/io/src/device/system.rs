//! The driver, the ring and the devices of this process. Each is made on first use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ingot_format::{briefly, locked};

use super::Device;
use super::driver::{Driver, is_in_use, refuse_child};
use super::fault::DeviceFault;
use super::gpu::Gpu;
use super::ring::{CHUNK_NBYTES, PINNED_NBYTES, Ring};
use crate::options::PINNED_VARIABLE;

/// Systems by the library of the driver; `None` means the driver of this machine.
static SYSTEMS: Mutex<BTreeMap<Option<PathBuf>, System>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct System {
    driver: Arc<Driver>,
    ring: Arc<Ring>,
    gpus: BTreeMap<i32, Arc<Gpu>>,
}

/// Returns the device with this number.
pub(super) fn device(ordinal: i32, driver: Option<&Path>) -> Result<Device, DeviceFault> {
    // Before the lock, which another thread may have held when this process was forked.
    refuse_child()?;
    let mut systems = locked(&SYSTEMS);
    let key = driver.map(Path::to_owned);
    if !systems.contains_key(&key) {
        systems.insert(key.clone(), System::begin(driver)?);
    }
    let Some(system) = systems.get_mut(&key) else {
        unreachable!("it was inserted above");
    };
    Ok(Device {
        gpu: system.gpu(ordinal)?,
        ring: Arc::clone(&system.ring),
    })
}

/// The reason if some slots of the ring are not pinned.
pub fn why_pageable() -> Option<String> {
    if !is_in_use() {
        return None;
    }
    // In a forked child, the lock may stay locked for ever.
    let systems = briefly(&SYSTEMS)?;
    systems.values().find_map(|system| system.ring.why_pageable())
}

/// Frees the pinned memory that no copy uses now, instead of after some idle time.
pub fn release_pinned() {
    if !is_in_use() {
        return;
    }
    let systems = locked(&SYSTEMS);
    systems.values().for_each(|system| system.ring.release_unused());
}

impl System {
    fn begin(driver: Option<&Path>) -> Result<System, DeviceFault> {
        let most = pinned_of_environment()?;
        Ok(System {
            driver: Arc::new(Driver::load(driver)?),
            ring: Arc::new(Ring::new(CHUNK_NBYTES, most)),
            gpus: BTreeMap::new(),
        })
    }

    /// Returns the device with this number, opened again if it was reset.
    fn gpu(&mut self, ordinal: i32) -> Result<Arc<Gpu>, DeviceFault> {
        if let Some(gpu) = self.gpus.get(&ordinal).filter(|gpu| !gpu.is_reset()) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Gpu::open(&self.driver, ordinal)?);
        self.gpus.insert(ordinal, Arc::clone(&gpu));
        Ok(gpu)
    }
}

/// The value of [`PINNED_VARIABLE`], in bytes.
fn pinned_of_environment() -> Result<usize, DeviceFault> {
    match std::env::var(PINNED_VARIABLE) {
        Ok(found) if !found.is_empty() => found.parse().map_err(|_| DeviceFault::Pinned { found }),
        _ => Ok(PINNED_NBYTES),
    }
}
