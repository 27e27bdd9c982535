//! Calls of the system for files, directories and names. `unix` and `windows` have the same functions and types, and one of
//! the two is compiled, so that callers need not know the system.

mod entry;
mod facts;
mod locked;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

pub use entry::blob_digest;
pub(crate) use entry::{DirectoryEntry, Resolved, is_shared};
pub(crate) use facts::{Birth, Facts, Kind, Lock, Opening, Refusal, Size, Unlinked};
pub(crate) use locked::Locked;
pub(crate) use system::attributes::Attributes;
pub(crate) use system::beneath::Beneath;
pub(crate) use system::directory::Directory;
#[cfg(test)]
pub(crate) use system::fault::out_of_descriptors;
pub(crate) use system::fault::{
    exists, has_no_locks, in_use, is_a_directory, is_out_of_descriptors, is_replaced_by_copy, unsupported,
};
pub(crate) use system::file::{
    RESERVED_AT_ONCE, append, check_extent, check_room, check_size_limit, descriptors_allowed, facts,
    facts_at, facts_of_name, file_system, lock_holder, open_both_ways, open_direct, open_for_reading,
    read_at, refuses_direct, remote_file_system, reserve, share_lock, try_lock, unlock, wait_writable,
    write_all_at, write_at,
};
#[cfg(feature = "remote")]
pub(crate) use system::file::{create_private_directory, is_ours, is_private_directory};
pub(crate) use system::name::{cut, name_bytes, name_of};
pub(crate) use system::resolve::resolve;
