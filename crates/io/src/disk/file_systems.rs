//! Which file systems are slow to map.

use std::fs::File;

use super::file_system;

/// File systems whose pages come over a network or through a process, by the number that `statfs` reports (linux/magic.h,
/// and the sources of those outside the kernel). Mapping a file there fetches it page by page, 30 to 50 times slower than
/// reading it, and an error on the way is a SIGBUS.
pub(crate) const REMOTE_FILE_SYSTEMS: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x517B, "SMB"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x0BD0_0BD0, "Lustre"),
    (0x00C3_6400, "Ceph"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414F, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x2003_0528, "OrangeFS"),
    (0x786F_4256, "vboxsf"),
    (0xBACB_ACBC, "vmhgfs"),
    (0x7C7C_6673, "prl_fs"),
    (0x6B41_4653, "kAFS"),
    (0xBEEF_DEAD, "StorNext"),
    (0xAAD7_AAEA, "PanFS"),
    (0x0131_11A8, "IBRIX"),
];

/// Return the name of the file system of `file` if it is one of [`REMOTE_FILE_SYSTEMS`].
pub(crate) fn remote_file_system(file: &File) -> Option<&'static str> {
    file_system(file).and_then(remote_name)
}

fn remote_name(number: u32) -> Option<&'static str> {
    REMOTE_FILE_SYSTEMS
        .iter()
        .find(|row| row.0 == number)
        .map(|row| row.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_each_file_system_once() {
        for (number, name) in REMOTE_FILE_SYSTEMS {
            assert_eq!(remote_name(*number), Some(*name), "two rows with one number");
            let rows = REMOTE_FILE_SYSTEMS.iter().filter(|row| row.1 == *name).count();
            assert_eq!(rows, 1, "{name}");
        }
        let ext4 = 0xEF53;
        assert_eq!(remote_name(ext4), None);
    }
}
