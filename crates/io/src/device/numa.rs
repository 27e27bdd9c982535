//! The node of the host's memory that is near a device: copies from another node take up to twice as long.

#[cfg(target_os = "linux")]
pub(super) use linux::near;

/// Run `work` in place: the system does not report which processors are near.
#[cfg(not(target_os = "linux"))]
pub(super) fn near<R>(_: Option<u32>, work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;
    use std::ops::RangeInclusive;

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// Run `work` on the processors of `node` that this thread may use, so that memory it allocates is there. If there are
    /// none, or the system does not report them, it runs in place.
    pub(in crate::device) fn near<R>(node: Option<u32>, work: impl FnOnce() -> R) -> R {
        let _moved = node.and_then(Moved::to);
        work()
    }

    /// A thread that is bound to some processors until this is dropped.
    struct Moved {
        before: CpuSet,
    }

    impl Moved {
        /// `None` if the thread was not bound.
        fn to(node: u32) -> Option<Moved> {
            let list = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
            let before = sched_getaffinity(None).ok()?;
            let mut some = CpuSet::new();
            let near = ranges(&list)?.into_iter().flatten();
            near.filter(|&number| number < CpuSet::MAX_CPU && before.is_set(number))
                .for_each(|number| some.set(number));
            if some.count() == 0 || some == before {
                return None;
            }
            sched_setaffinity(None, &some).ok()?;
            Some(Moved { before })
        }
    }

    impl Drop for Moved {
        fn drop(&mut self) {
            // Allow the earlier processors again, unless a container has lost some of them.
            let _ = sched_setaffinity(None, &self.before);
        }
    }

    /// Parses the numbers in a list such as `0-3,8`.
    fn ranges(list: &str) -> Option<Vec<RangeInclusive<usize>>> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse().ok()?..=last.parse().ok()?)
        };
        list.trim()
            .split(',')
            .filter(|part| !part.is_empty())
            .map(range)
            .collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn lists_of_processors_are_read_as_the_kernel_writes_them() {
            assert_eq!(ranges("0-3,8\n"), Some(vec![0..=3, 8..=8]));
            assert_eq!(ranges("\n"), Some(vec![]));
            assert_eq!(ranges("some"), None);
        }

        #[test]
        fn a_thread_is_moved_for_the_work_alone() {
            let before = sched_getaffinity(None).unwrap();
            let on_node = |node| near(Some(node), || sched_getaffinity(None).unwrap());
            // On a machine with one node, all are near.
            for node in [0, 1, 4_000_000] {
                let meanwhile = on_node(node);
                assert!(meanwhile.count() > 0);
                assert!(
                    (0..CpuSet::MAX_CPU).all(|number| before.is_set(number) || !meanwhile.is_set(number))
                );
                assert!(sched_getaffinity(None).unwrap() == before);
            }
            assert!(near(None, || sched_getaffinity(None).unwrap()) == before);
        }
    }
}
