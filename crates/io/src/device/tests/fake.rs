//! The simulated driver, and a framework that allocates by it: for tests.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fake_cuda::control::Counters;
use ingot_format::to_u64;
use libloading::{Library, Symbol};

use super::Device;
use super::bytes::DeviceBytes;
use super::driver::{Driver, Stream};
use super::gpu::Way;
use super::memory::DeviceRegion;
use super::onto::{Allocator, Fresh, Onto, Refusal};
use super::ring::Ring;
use super::stream::DeviceStream;

/// The simulator has one state for the whole process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The library stays loaded: each load takes slots for thread-local storage from Windows, which only the end of the
/// process frees.
static KEPT: OnceLock<Library> = OnceLock::new();

/// Bytes that are copied at once: less than a tensor of the tests has.
pub(super) const SMALL_CHUNK_NBYTES: usize = 4096;
/// The size of a slot for them.
pub(super) const SMALL_SLOT_NBYTES: usize = SMALL_CHUNK_NBYTES + 4096;

/// The simulator, after a reset.
pub(super) struct Fake {
    library: Arc<Library>,
    pub(super) driver: Arc<Driver>,
    pub(super) ring: Arc<Ring>,
    _turn: MutexGuard<'static, ()>,
}

/// Faults of the simulator: steps that it may leave out.
pub(super) const MISTAKES: [(usize, &str); 4] = [
    (1, "threads do not wait for events"),
    (2, "copies do not wait for the caller's stream"),
    (3, "the caller's stream does not wait for copies"),
    (4, "events are recorded on another stream"),
];

fn path() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.set_file_name(format!(
        "{}fake_cuda{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    ));
    path
}

impl Fake {
    /// Resets the simulator to this many devices. The ring has this many small slots.
    pub(super) fn new(seed: u64, devices: usize, slots: usize) -> Fake {
        Fake::with_chunks(seed, devices, slots, SMALL_CHUNK_NBYTES)
    }

    /// The same with chunks of another size.
    pub(super) fn with_chunks(seed: u64, devices: usize, slots: usize, chunk_nbytes: usize) -> Fake {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: requires a library that does no harm when it is loaded: the workspace's own.
        let loaded = || unsafe { Library::new(path()) }.unwrap();
        KEPT.get_or_init(loaded);
        let library = Arc::new(loaded());
        function::<extern "C" fn(u64, usize)>(&library, "fake_cuda_reset")(seed, devices);
        let driver = Arc::new(Driver::load(Some(&path())).unwrap());
        Fake {
            library,
            driver,
            ring: Arc::new(Ring::new(chunk_nbytes, slots * (chunk_nbytes + 4096))),
            _turn: turn,
        }
    }

    pub(super) fn device(&self, ordinal: i32) -> Device {
        Device::open(&self.driver, ordinal, &self.ring).unwrap()
    }

    /// The destination of reads onto a device, in the order of the default stream.
    pub(super) fn onto(&self, device: &Device) -> Onto {
        self.onto_on(device, Neighbour::DEFAULT)
    }

    /// The destination of reads onto a device, in the order of this stream.
    pub(super) fn onto_on(&self, device: &Device, stream: Neighbour) -> Onto {
        let framework = Framework {
            library: Arc::clone(&self.library),
            ordinal: usize::try_from(device.ordinal()).unwrap(),
            stream: stream.0.expose_provenance(),
        };
        Onto::new(Fake::stream_on(device, stream, Way::In), Arc::new(framework))
    }

    /// This stream of a caller, for copies in one direction.
    pub(super) fn stream_on(device: &Device, stream: Neighbour, way: Way) -> DeviceStream {
        DeviceStream::of(device.clone(), Stream::of_framework(stream.0), way).unwrap()
    }

    /// The default stream of a device, to copy to it.
    pub(super) fn stream(device: &Device) -> DeviceStream {
        Fake::stream_on(device, Neighbour::DEFAULT, Way::In)
    }

    /// The default stream of a device, to copy from it.
    pub(super) fn outgoing(device: &Device) -> DeviceStream {
        Fake::stream(device).outgoing().unwrap()
    }

    /// Waits for the copies of a caller with the default stream.
    pub(super) fn finish(device: &Device) {
        Fake::stream(device).finish().unwrap();
    }

    /// Device memory with these bytes, like the memory of a tensor.
    pub(super) fn block_of(&self, device: &Device, bytes: &[u8]) -> DeviceRegion {
        let fresh = Fresh {
            nbytes: bytes.len(),
            tensor: None,
        };
        let block = self.onto(device).allocator.allocate(&[fresh]).unwrap().remove(0);
        // The previous owner's queued work must not overwrite the bytes.
        self.seen_by_caller(device, block.address(), block.len());
        let write = self.function::<unsafe extern "C" fn(u64, *const u8, usize) -> bool>("fake_cuda_write");
        // SAFETY: requires `bytes.len()` bytes.
        assert!(unsafe { write(block.address(), bytes.as_ptr(), bytes.len()) });
        block
    }

    /// Queues work that fills the block with `byte`, like a kernel of the caller.
    pub(super) fn queue_fill(&self, device: &Device, block: &DeviceRegion, byte: u8) {
        type Fill = extern "C" fn(*mut c_void, usize, u64, usize, u8) -> i32;
        let fill = self.function::<Fill>("fake_cuda_old_owner");
        let ordinal = usize::try_from(device.ordinal()).unwrap();
        let filled = fill(ptr::null_mut(), ordinal, block.address(), block.len(), byte);
        assert_eq!(filled, 0);
    }

    /// The memory of a block, to be saved.
    pub(super) fn bytes(device: &Device, block: &DeviceRegion) -> DeviceBytes {
        Fake::bytes_on(&Fake::outgoing(device), block)
    }

    /// The same in the order of this stream.
    pub(super) fn bytes_on(stream: &DeviceStream, block: &DeviceRegion) -> DeviceBytes {
        // SAFETY: requires memory that is allocated as long as the result is there: tests keep the block.
        unsafe { DeviceBytes::new(stream, block.address(), block.len()) }
    }

    fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        function(&self.library, name)
    }

    pub(super) fn make_mistake(&self, number: usize) {
        self.function::<extern "C" fn(usize)>("fake_cuda_mistake")(number);
    }

    pub(super) fn fail(&self, number: u64, code: i32) {
        self.function::<extern "C" fn(u64, i32)>("fake_cuda_fail")(number, code);
    }

    pub(super) fn pin_limit(&self, nbytes: usize) {
        self.function::<extern "C" fn(usize)>("fake_cuda_pin_limit")(nbytes);
    }

    /// Makes registering memory fail with this code.
    pub(super) fn register_code(&self, code: i32) {
        self.function::<extern "C" fn(i32)>("fake_cuda_register_code")(code);
    }

    /// Sets the code with which pinning fails beyond the limit.
    pub(super) fn pin_code(&self, code: i32) {
        self.function::<extern "C" fn(i32)>("fake_cuda_pin_code")(code);
    }

    /// Begins or ends a capture on the default stream of the first device.
    pub(super) fn capture(&self, is_capturing: bool) {
        assert_eq!(self.capture_on(Neighbour::DEFAULT, is_capturing), 0);
    }

    /// Begin or end a capture in global mode. Return the code of the driver, which reports at the end whether the capture
    /// was broken.
    pub(super) fn capture_on(&self, stream: Neighbour, is_capturing: bool) -> i32 {
        let capture = self.function::<extern "C" fn(*mut c_void, usize, bool) -> i32>("fake_cuda_capture");
        capture(stream.0, 0, is_capturing)
    }

    /// Returns a new stream of another user of a device.
    pub(super) fn neighbour(&self, device: &Device) -> Neighbour {
        type Create = unsafe extern "C" fn(*mut *mut c_void, u32) -> i32;
        let create = self.function::<Create>("cuStreamCreate");
        let mut stream = ptr::null_mut();
        let created = device.gpu.within(|_| {
            // SAFETY: requires a place for the answer.
            assert_eq!(unsafe { create(&raw mut stream, 1) }, 0);
            Ok(())
        });
        created.unwrap();
        Neighbour(stream)
    }

    /// Begins or ends an endless kernel on the default stream of the first device.
    pub(super) fn busy(&self, is_busy: bool) {
        self.busy_on(0, Neighbour::DEFAULT, is_busy);
    }

    /// The same on a stream of a device.
    pub(super) fn busy_on(&self, ordinal: usize, stream: Neighbour, is_busy: bool) {
        let busy = self.function::<extern "C" fn(*mut c_void, usize, bool) -> i32>("fake_cuda_busy");
        assert_eq!(busy(stream.0, ordinal, is_busy), 0);
    }

    /// Makes copies complete when they are queued.
    pub(super) fn instant(&self) {
        self.function::<extern "C" fn(bool)>("fake_cuda_instant")(true);
    }

    /// Runs all queued work: first the callers' work, then the rest.
    pub(super) fn settle(&self) {
        assert_eq!(self.function::<extern "C" fn() -> i32>("fake_cuda_finish")(), 0);
    }

    /// Resets a device, as `cudaDeviceReset` does.
    pub(super) fn reset_device(&self, ordinal: usize) {
        let reset = self.function::<extern "C" fn(usize) -> i32>("fake_cuda_device_reset");
        assert_eq!(reset(ordinal), 0);
    }

    /// Makes every later call for a device fail with this code.
    pub(super) fn lose(&self, ordinal: usize, code: i32) {
        let lose = self.function::<extern "C" fn(usize, i32) -> i32>("fake_cuda_lose");
        assert_eq!(lose(ordinal, code), 0);
    }

    /// Sets the capture mode of this thread; returns the mode before.
    pub(super) fn exchange_mode(&self, mode: i32) -> i32 {
        type Exchange = unsafe extern "C" fn(*mut i32) -> i32;
        let exchange = self.function::<Exchange>("cuThreadExchangeStreamCaptureMode");
        let mut mode = mode;
        // SAFETY: requires a mode that can be replaced.
        assert_eq!(unsafe { exchange(&raw mut mode) }, 0);
        mode
    }

    pub(super) fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        let count = self.function::<unsafe extern "C" fn(*mut Counters)>("fake_cuda_counters");
        // SAFETY: requires a place to write to.
        unsafe { count(&raw mut counters) };
        counters
    }

    /// The bytes at an address, as work in the order of the caller's stream finds them.
    pub(super) fn seen_by_caller(&self, device: &Device, address: u64, nbytes: usize) -> Vec<u8> {
        self.seen_on(device, Neighbour::DEFAULT, address, nbytes)
    }

    /// The same in the order of this stream.
    pub(super) fn seen_on(&self, device: &Device, stream: Neighbour, address: u64, nbytes: usize) -> Vec<u8> {
        device.gpu.finish(Stream::of_framework(stream.0)).unwrap();
        let mut bytes = vec![0; nbytes];
        let read = self.function::<unsafe extern "C" fn(u64, *mut u8, usize) -> bool>("fake_cuda_read");
        // SAFETY: requires room for `nbytes`.
        assert!(unsafe { read(address, bytes.as_mut_ptr(), nbytes) });
        bytes
    }
}

/// A stream of another user of a device, unknown to the ring.
#[derive(Clone, Copy)]
pub(super) struct Neighbour(*mut c_void);

// SAFETY: the address is never dereferenced here.
unsafe impl Send for Neighbour {}
// SAFETY: as for `Send`.
unsafe impl Sync for Neighbour {}

impl Neighbour {
    pub(super) const DEFAULT: Neighbour = Neighbour(ptr::null_mut());
}

/// A function of `control`.
fn function<'l, T>(library: &'l Library, name: &str) -> Symbol<'l, T> {
    // SAFETY: requires the type of the function: each caller passes the type that `control` declares.
    unsafe { library.get(name.as_bytes()) }.unwrap()
}

/// Allocates as a framework does: freed memory is handed out first, and earlier work on the caller's stream may still write
/// to it.
#[derive(Debug)]
struct Framework {
    library: Arc<Library>,
    ordinal: usize,
    /// The address of the caller's stream.
    stream: usize,
}

impl Allocator for Framework {
    fn allocate(&self, blocks: &[Fresh<'_>]) -> Result<Vec<DeviceRegion>, Refusal> {
        type Allocate = extern "C" fn(usize, usize) -> u64;
        type OldOwner = extern "C" fn(*mut c_void, usize, u64, usize, u8) -> i32;
        let allocate = function::<Allocate>(&self.library, "fake_cuda_allocate");
        let old_owner = function::<OldOwner>(&self.library, "fake_cuda_old_owner");
        let block = |fresh: &Fresh<'_>| {
            let address = allocate(self.ordinal, fresh.nbytes.max(1));
            if address == 0 {
                return Err("the device is full".into());
            }
            let (nbytes, stream) = (fresh.nbytes, self.stream);
            let handle = ptr::with_exposed_provenance_mut(stream);
            assert_eq!(old_owner(handle, self.ordinal, address, nbytes, 0x99), 0);
            let library = Arc::clone(&self.library);
            let (ordinal, number) = (self.ordinal, i32::try_from(self.ordinal).unwrap());
            let owner = Arc::new(Allocated {
                library,
                ordinal,
                address,
                stream,
            });
            // SAFETY: requires memory that is allocated until the owner goes, which frees it.
            Ok(unsafe { DeviceRegion::new(number, address, nbytes, owner) })
        };
        blocks.iter().map(block).collect()
    }
}

/// Frees its memory when dropped, in the order of the caller's stream.
struct Allocated {
    library: Arc<Library>,
    ordinal: usize,
    address: u64,
    stream: usize,
}

impl Drop for Allocated {
    fn drop(&mut self) {
        type Free = extern "C" fn(*mut c_void, usize, u64) -> i32;
        let free = function::<Free>(&self.library, "fake_cuda_free_in_order");
        let handle = ptr::with_exposed_provenance_mut(self.stream);
        assert_eq!(free(handle, self.ordinal, self.address), 0);
    }
}

/// Bytes that depend on their places.
pub(super) fn pattern(seed: u64, nbytes: usize) -> Vec<u8> {
    let byte = |at: usize| (to_u64(at).wrapping_mul(31).wrapping_add(seed * 7) % 251).to_le_bytes()[0];
    (0..nbytes).map(byte).collect()
}
