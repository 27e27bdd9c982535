//! The only reader of tensors: whole ones and parts of them, as they are or converted, into fresh memory or into the
//! caller's; and of bytes that are shown to somebody and forgotten, such as for digests and statistics.
//!
//! ```text
//! Part ─piece─► Piece ─Plan::fresh, Plan::into_each─► Plan ─execute─► Chunk ─join─► task ─gather, input─► memory
//! run  ─show──► Piece ─Plan::into_each──────────────► Plan ─execute─► Chunk ─join─► task ─gather, input─► witness
//! ```
//!
//! - A [`part::Part`] is what is wanted of a tensor: which elements, and as what dtype. It is proven to be possible.
//! - A [`plan::Piece`] is the same in numbers: bytes of a file, a place in memory, and what happens between. One tensor may
//!   have several pieces, and several tensors may go to one piece of memory; nothing else knows of tensors.
//! - A [`plan::Plan`] gives each piece its place. Neighbours that lie in memory as in the file become one piece.
//! - [`execute::execute`] cuts the pieces into chunks of a few MiB, sorts the chunks of all pieces by where they are in the
//!   files, and makes tasks of those that follow one another. Threads share the tasks, while the caller watches.
//! - [`gather`] reads a task. It takes the next thousand runs of its chunks, has [`input`] fill them, straight in their
//!   memory or in a stage that stays in a core's cache, and converts or scatters what is there.
//! - A [`home::Home`] is where fresh memory is: the host, or a device, whose memory a framework gives. [`relay`] has the
//!   chunks for a device read into a pinned slot, and sends that.
//!
//! Column slices of a file in the page cache are read by rows of blocks, not by runs: [`input::Input::read_rows`] copies the
//! blocks of a row from the mapping of the file, or reads the row in stretches of 256 KiB and copies the blocks from there.
//!
//! [`input`] reads all other runs that are close together at once, which depends on the source. A source behind a network
//! returns one long read, over gaps of 128 KiB. From a file, neighbours with less than a page between them are one `preadv`,
//! and runs of a few bytes are read with the bytes between them and copied.
//!
//! A new device is a new [`gather::Destination`], and whoever has to see all bytes on their way is a [`input::Witness`]:
//! neither is another way of reading. [`show::show`] reads for witnesses alone.

pub(crate) mod execute;
pub(crate) mod gather;
pub(crate) mod home;
pub(crate) mod input;
pub(crate) mod part;
pub(crate) mod plan;
pub(crate) mod prefetch;
#[allow(clippy::module_inception, reason = "the file that has the function `read`")]
pub(crate) mod read;
mod relay;
mod runs;
pub(crate) mod show;
#[cfg(test)]
mod tests;
