//! The size of the cache, and the removal of the least recently used blocks.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::block::BLOCK_NBYTES;
use crate::disk;

/// Room that is made at once, as a part of the size: listing the cache takes longer than writing a block.
const MADE_PART: u64 = 16;

/// A block that another process may still write is younger than this.
const UNFINISHED: Duration = Duration::from_secs(3600);

/// The ending of blocks that are being written.
pub(super) const UNFINISHED_ENDING: &str = "part";

/// The room of the cache.
#[derive(Debug)]
pub(super) struct Room {
    /// The directory of the blocks, whose subdirectories have the files.
    blocks: PathBuf,
    /// The most bytes of all files.
    most_nbytes: Option<u64>,
    /// Files that were used since then are not removed, and no block makes room for another of its file: a model larger than
    /// the cache would otherwise remove its own first blocks, and each load would fetch all of it again.
    since: SystemTime,
}

/// A file of the cache.
struct Entry {
    path: PathBuf,
    used: SystemTime,
    nbytes: u64,
    /// Whether a process may still write it.
    is_unfinished: bool,
}

impl Room {
    pub(super) fn new(blocks: PathBuf, most_nbytes: Option<u64>) -> Room {
        Room {
            blocks,
            most_nbytes,
            since: SystemTime::now(),
        }
    }

    pub(super) fn is_limited(&self) -> bool {
        self.most_nbytes.is_some()
    }

    pub(super) fn since(&self) -> SystemTime {
        self.since
    }

    /// Reserve room for the new file `path`, and remove others if necessary. `sum` is the locked file with the bytes of all. Return
    /// whether there is room.
    ///
    /// Room is reserved before the file is written. A process that is killed leaves a sum that is too large, which the
    /// next removal corrects. A sum that is too small would let the cache grow beyond its size.
    pub(super) fn reserve(&self, sum: &File, path: &Path, nbytes: u64) -> io::Result<bool> {
        let most = self.most_nbytes.unwrap_or(u64::MAX);
        let mut used = match read_sum(sum)? {
            Some(used) if used.saturating_add(nbytes) <= most => used,
            _ => self.remove(most.saturating_sub(nbytes), key_of(path))?,
        };
        let has_room = used.saturating_add(nbytes) <= most;
        if has_room {
            used += nbytes;
        }
        write_sum(sum, used)?;
        Ok(has_room)
    }

    /// Release the room of a file that was not written, or was removed.
    pub(super) fn release(&self, sum: &File, nbytes: u64) -> io::Result<()> {
        match read_sum(sum)? {
            Some(used) => write_sum(sum, used.saturating_sub(nbytes)),
            None => Ok(()),
        }
    }

    /// Remove the files that were not used for the longest time, except those with this key, if all have more than `most`
    /// bytes. Return the bytes of the others.
    fn remove(&self, most: u64, kept: &str) -> io::Result<u64> {
        let mut entries = list(&self.blocks)?;
        let mut used: u64 = entries.iter().map(|entry| entry.nbytes).sum();
        if used <= most {
            return Ok(used);
        }
        entries.sort_by_key(|entry| entry.used);
        let wanted = most - most / MADE_PART;
        for entry in entries {
            if used <= wanted || entry.used >= self.since {
                break;
            }
            let may_go = !entry.is_unfinished && key_of(&entry.path) != kept;
            if may_go && fs::remove_file(&entry.path).is_ok() {
                used -= entry.nbytes;
            }
        }
        Ok(used)
    }
}

/// Return the part of a name that all blocks of one version of a file have.
fn key_of(path: &Path) -> &str {
    let name = path.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.split(['-', '.']).next())
        .unwrap_or_default()
}

fn is_unfinished(path: &Path, used: SystemTime) -> bool {
    let age = SystemTime::now().duration_since(used);
    path.extension().is_some_and(|ending| ending == UNFINISHED_ENDING) && age.unwrap_or_default() < UNFINISHED
}

/// Return all files in the subdirectories of `blocks`.
fn list(blocks: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for folder in fs::read_dir(blocks)? {
        // Another process may remove any of them meanwhile.
        for entry in fs::read_dir(folder?.path()).into_iter().flatten().flatten() {
            let Ok(facts) = entry.metadata() else { continue };
            let (path, used) = (entry.path(), facts.modified()?);
            let is_unfinished = is_unfinished(&path, used);
            // The rest of it is reserved.
            let least = if is_unfinished { BLOCK_NBYTES } else { 0 };
            entries.push(Entry {
                path,
                used,
                nbytes: facts.len().max(least),
                is_unfinished,
            });
        }
    }
    Ok(entries)
}

/// Return the number in the file, or `None` if it has none.
fn read_sum(sum: &File) -> io::Result<Option<u64>> {
    let mut bytes = [0; 8];
    let count = disk::read_at(sum, &mut bytes, 0)?;
    Ok((count == bytes.len()).then_some(u64::from_le_bytes(bytes)))
}

fn write_sum(sum: &File, nbytes: u64) -> io::Result<()> {
    disk::write_all_at(sum, &nbytes.to_le_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Cache {
        folder: tempfile::TempDir,
        sum: File,
    }

    impl Cache {
        fn new() -> Cache {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("blocks/ab")).unwrap();
            let sum = folder.path().join("nbytes");
            let sum = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(sum)
                .unwrap();
            Cache { folder, sum }
        }

        fn room(&self, most: u64) -> Room {
            Room::new(self.folder.path().join("blocks"), Some(most))
        }

        /// Write a file that was used this many seconds ago.
        fn file(&self, name: &str, nbytes: usize, seconds: u64) {
            let path = self.folder.path().join("blocks/ab").join(name);
            fs::write(&path, vec![0; nbytes]).unwrap();
            let used = SystemTime::now() - Duration::from_secs(seconds);
            File::options()
                .write(true)
                .open(path)
                .unwrap()
                .set_modified(used)
                .unwrap();
        }

        fn names(&self) -> Vec<String> {
            let names = fs::read_dir(self.folder.path().join("blocks/ab")).unwrap();
            let mut names: Vec<_> = names
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    #[test]
    fn the_files_that_were_not_used_for_the_longest_time_are_removed() {
        let cache = Cache::new();
        cache.file("a", 100, 30);
        cache.file("b", 100, 40);
        cache.file("c", 100, 20);
        let room = cache.room(350);
        assert!(room.reserve(&cache.sum, Path::new("new-1"), 50).unwrap());
        assert_eq!(
            (cache.names().len(), read_sum(&cache.sum).unwrap()),
            (3, Some(350))
        );
        assert!(room.reserve(&cache.sum, Path::new("new-1"), 100).unwrap());
        assert_eq!(cache.names(), ["a", "c"]);
        assert_eq!(read_sum(&cache.sum).unwrap(), Some(300));
    }

    #[test]
    fn files_in_use_are_kept_and_there_is_no_room() {
        let cache = Cache::new();
        let room = cache.room(150);
        cache.file("a", 100, 0);
        assert!(!room.reserve(&cache.sum, Path::new("new-1"), 100).unwrap());
        assert_eq!(cache.names(), ["a"]);
        assert_eq!(read_sum(&cache.sum).unwrap(), Some(100));
        assert!(
            !cache
                .room(10)
                .reserve(&cache.sum, Path::new("new-1"), 11)
                .unwrap()
        );
    }

    #[test]
    fn no_block_makes_room_for_another_of_its_file() {
        let cache = Cache::new();
        cache.file("new-0", 100, 30);
        cache.file("old-0", 100, 20);
        assert!(
            cache
                .room(200)
                .reserve(&cache.sum, Path::new("new-1"), 100)
                .unwrap()
        );
        assert_eq!(cache.names(), ["new-0"]);
        cache.file("new-1", 100, 0);
        assert!(
            !cache
                .room(200)
                .reserve(&cache.sum, Path::new("new-2"), 100)
                .unwrap()
        );
    }

    #[test]
    fn room_of_killed_processes_is_found_again() {
        let cache = Cache::new();
        write_sum(&cache.sum, u64::MAX).unwrap();
        cache.file("old.part", 10, 7200);
        cache.file("new.part", 10, 30);
        let room = cache.room(BLOCK_NBYTES + 30);
        assert!(room.reserve(&cache.sum, Path::new("new-1"), 10).unwrap());
        assert_eq!(read_sum(&cache.sum).unwrap(), Some(BLOCK_NBYTES + 20));
        room.release(&cache.sum, 10).unwrap();
        let room = cache.room(2 * BLOCK_NBYTES);
        assert!(
            room.reserve(&cache.sum, Path::new("new-1"), BLOCK_NBYTES - 5)
                .unwrap()
        );
        assert_eq!(cache.names(), ["new.part"]);
        assert_eq!(read_sum(&cache.sum).unwrap(), Some(2 * BLOCK_NBYTES - 5));
    }
}
