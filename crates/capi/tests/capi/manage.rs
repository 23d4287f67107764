//! Work on whole filesystems from C, and the images that it changes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tempfile::TempDir;
use ubtrfs::Filesystem;
use ubtrfs_testkit::{LoopMount, Rng, btrfs_check_array, capability, check_quotas};

use crate::library::{Compiler, compile, output_of};
use crate::programs::program;

#[test]
fn every_function_for_whole_filesystems_works_from_c() {
    let dir = TempDir::with_prefix("ubtrfs-capi-manage-").unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        if let Some(made) = compile(&program("manage.c"), dir.path(), compiler) {
            assert_eq!(output_of(&made, &["calls".as_ref()]), "done\n");
        }
    }
}

/// Checks the images of a filesystem, and compares a file with what Linux reads.
fn judge(images: &[&Path], content: &[u8]) {
    if capability::kernel_oracle() {
        btrfs_check_array(images).unwrap();
        let mount = LoopMount::array(images, "ro").unwrap();
        assert!(fs::read(mount.join("dir/f")).unwrap() == content);
        mount.close().unwrap();
    }
}

#[test]
fn own_devices_are_joined_repaired_and_separated() {
    let dir = TempDir::with_prefix("ubtrfs-capi-array-").unwrap();
    let made = compile(&program("manage.c"), dir.path(), Compiler::Sanitized).unwrap();
    let [first, second] = ["first.img", "second.img"].map(|name| dir.path().join(name));
    let content = Rng::new(36).bytes(20 << 20);
    let filesystem = Filesystem::make_image(&first, 512 << 20).unwrap();
    filesystem.create_dir("/dir").unwrap();
    filesystem.write("/dir/f", &content).unwrap();
    filesystem.close().unwrap();
    let run = |mode: &str| output_of(&made, &[mode.as_ref(), first.as_os_str(), second.as_os_str()]);

    assert_eq!(run("convert"), "");
    judge(&[&first, &second], &content);

    let raw = fs::read(&second).unwrap();
    let place = raw.chunks(4096).position(|block| block == &content[..4096]).unwrap() * 4096;
    fs::File::options().write(true).open(&second).unwrap().write_all_at(&[7; 8192], place as u64).unwrap();
    let repaired = "device 1: 0 bad, 0 corrected\ndevice 2: 2 bad, 2 corrected\ndir/f: 8192 bytes repaired, 0 lost\n";
    assert_eq!(run("scrub"), repaired);
    assert_eq!(run("scrub"), "device 1: 0 bad, 0 corrected\ndevice 2: 0 bad, 0 corrected\n");
    assert!(fs::read(&second).unwrap()[place..][..8192] == content[..8192]);
    judge(&[&first, &second], &content);

    assert_eq!(run("remove"), "");
    judge(&[&first], &content);

    assert_eq!(output_of(&made, &["quota".as_ref(), first.as_os_str()]), "");
    judge(&[&first], &content);
    if capability::kernel_oracle() {
        check_quotas(&first).unwrap();
    }
}
