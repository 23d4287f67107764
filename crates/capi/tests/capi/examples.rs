//! The examples, and the images that they make.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use ubtrfs::{Filesystem, SnapshotAccess};
use ubtrfs_testkit::{Compare, Image, LoopMount, btrfs_check, capability, compare_trees, receive_by_linux};

use crate::header::crate_dir;
use crate::library::{Compiler, compile, execute, output_of};

fn example(name: &str) -> PathBuf {
    crate_dir().join("examples").join(name)
}

/// A folder with a few files of each kind that the examples copy.
fn sample_tree(dir: &Path) -> PathBuf {
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("etc/app")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::write(tree.join("etc/app/config"), "color = blue\n").unwrap();
    fs::write(tree.join("etc/large"), vec![7; 3 << 20]).unwrap();
    fs::write(tree.join("etc/nothing"), "").unwrap();
    fs::write(tree.join("tool"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(tree.join("tool"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::write(tree.join("n\u{e4}me with spaces"), "text").unwrap();
    symlink("etc/app/config", tree.join("link")).unwrap();
    symlink("/nowhere", tree.join("broken")).unwrap();
    tree
}

/// Compares the content of an image with a folder, as Linux sees both, after `btrfs check`.
fn judge_image(image: &Path, tree: &Path, below: &str) {
    if capability::kernel_oracle() {
        btrfs_check(image).unwrap();
        let mount = LoopMount::new(image, "ro").unwrap();
        compare_trees(tree, &mount.join(below), Compare::COPY).unwrap();
        mount.close().unwrap();
    }
}

#[test]
fn the_image_builder_makes_an_image_that_linux_reads() {
    let dir = TempDir::with_prefix("ubtrfs-capi-image-").unwrap();
    let tree = sample_tree(dir.path());
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        if let Some(made) = compile(&example("make_image.c"), dir.path(), compiler) {
            let image = dir.path().join(format!("{compiler:?}.img"));
            output_of(&made, &[image.as_os_str(), tree.as_os_str()]);
            judge_image(&image, &tree, "");
        }
    }
}

#[test]
fn the_image_in_memory_keeps_what_was_durable() {
    let dir = TempDir::with_prefix("ubtrfs-capi-memory-").unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        let Some(made) = compile(&example("memory_image.c"), dir.path(), compiler) else { continue };
        let out = output_of(&made, &[]);
        assert!(out.starts_with("cannot close 'the storage of the test': "), "{out}");
        assert!(out.ends_with("clean: yes\ndurable\nreleased\n"), "{out}");
    }
}

/// Opens an image, changes it, and closes it.
fn change(image: &Path, work: impl FnOnce(&Filesystem) -> ubtrfs::Result<()>) {
    let fs = Filesystem::open_image(image).unwrap();
    work(&fs).unwrap();
    fs.close().unwrap();
}

#[test]
fn the_backup_brings_each_snapshot_back() {
    let dir = TempDir::with_prefix("ubtrfs-capi-backup-").unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        let Some(made) = compile(&example("backup.c"), dir.path(), compiler) else { continue };
        let [image, copy, streams] =
            ["disk.img", "copy.img", "streams"].map(|name| dir.path().join(format!("{compiler:?}-{name}")));
        fs::create_dir(&streams).unwrap();
        Filesystem::make_image(&image, 512 << 20).unwrap().close().unwrap();
        change(&image, |fs| {
            fs.create_subvolume("/home")?;
            fs.create_dir("/home/dir")?;
            fs.write("/home/large", vec![1; 8 << 20])?;
            fs.write("/home/dir/report", "sunday")
        });
        // A slow machine sees progress on the standard error.
        let backup = || {
            let output = execute(&made, &[image.as_os_str(), "/home".as_ref(), streams.as_os_str()], 300);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(backup(), format!("{}/1.stream\n", streams.display()));
        change(&image, |fs| fs.write("/home/dir/report", "monday"));
        backup();
        change(&image, |fs| {
            fs.rename("/home/dir/report", "/home/report")?;
            fs.remove_dir("/home/dir")?;
            fs.set_permissions("/home/report", 0o600)
        });
        backup();
        // A difference does not repeat what the receiver has.
        assert!(fs::metadata(streams.join("1.stream")).unwrap().len() > 8 << 20);
        assert!(fs::metadata(streams.join("2.stream")).unwrap().len() < 1 << 20);

        Filesystem::make_image(&copy, 512 << 20).unwrap().close().unwrap();
        let restored = output_of(&made, &["--restore".as_ref(), copy.as_os_str(), streams.as_os_str()]);
        assert_eq!(restored.lines().count(), 3, "{restored}");
        let fs = Filesystem::open_image(&copy).unwrap();
        assert_eq!(fs.read("/home.1/dir/report").unwrap(), b"sunday");
        assert_eq!(fs.read("/home.2/dir/report").unwrap(), b"monday");
        fs.close().unwrap();
        if capability::kernel_oracle() {
            btrfs_check(&image).unwrap();
            let source = LoopMount::new(&image, "ro").unwrap();
            judge_image(&copy, &source.join("home"), "home.3");
            // Linux receives the streams, too.
            let by_linux = Image::kernel_made(512 << 20, &[]).unwrap();
            let target = LoopMount::new(by_linux.path(), "").unwrap();
            for number in 1..=3 {
                receive_by_linux(&streams.join(format!("{number}.stream")), target.path()).unwrap();
            }
            compare_trees(&source.join("home"), &target.join("home.3"), Compare::COPY).unwrap();
            target.close().unwrap();
            source.close().unwrap();
        }
    }
}

#[test]
fn the_rescue_copies_all_but_the_damaged_bytes() {
    let dir = TempDir::with_prefix("ubtrfs-capi-rescue-").unwrap();
    let image = dir.path().join("disk.img");
    let good: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    let mut content = good.clone();
    content[500_000..500_016].copy_from_slice(b"here it is wrong");
    let filesystem = Filesystem::make_image(&image, 256 << 20).unwrap();
    filesystem.create_dir("/dir").unwrap();
    filesystem.write("/dir/good", &good).unwrap();
    filesystem.write("/dir/damaged", &content).unwrap();
    filesystem.symlink("good", "/dir/link").unwrap();
    filesystem.close().unwrap();
    let mut bytes = fs::read(&image).unwrap();
    let at = bytes.windows(16).position(|window| window == b"here it is wrong").unwrap();
    bytes[at] ^= 1;
    fs::write(&image, bytes).unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        let Some(made) = compile(&example("rescue.c"), dir.path(), compiler) else { continue };
        let folder = dir.path().join(format!("{compiler:?}"));
        let output = execute(&made, &[image.as_os_str(), folder.as_os_str()], 300);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.starts_with("rescue: //dir/damaged: cannot read '//dir/damaged': "), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "2 files, 1 damaged\n");
        assert_eq!(fs::read(folder.join("dir/good")).unwrap(), good);
        assert_eq!(fs::read_link(folder.join("dir/link")).unwrap(), Path::new("good"));
        let mut expected = content.clone();
        let sector = 500_000 / 4096 * 4096;
        expected[sector..sector + 4096].fill(0);
        assert!(fs::read(folder.join("dir/damaged")).unwrap() == expected);
    }
    damaged_tree_blocks_cost_what_lies_in_them(dir.path());
    // No filesystem at all is an error, too.
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let made = compile(&example("rescue.c"), dir.path(), Compiler::Sanitized).unwrap();
    let output = execute(&made, &[image.as_os_str(), dir.path().join("none").as_os_str()], 300);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn the_browser_shows_the_states_of_a_file() {
    let dir = TempDir::with_prefix("ubtrfs-capi-browser-").unwrap();
    let image = dir.path().join("disk.img");
    let filesystem = Filesystem::make_image(&image, 256 << 20).unwrap();
    filesystem.create_subvolume("/home").unwrap();
    for (name, text) in [("monday", "draft"), ("tuesday", "second draft")] {
        filesystem.write("/home/report", text).unwrap();
        filesystem.snapshot("/home", name, SnapshotAccess::ReadOnly).unwrap();
    }
    filesystem.write("/home/report", "final").unwrap();
    filesystem.close().unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        let Some(made) = compile(&example("snapshots.c"), dir.path(), compiler) else { continue };
        let show = |words: &[&str]| {
            let words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
            output_of(&made, &[&[image.as_os_str()], words.as_slice()].concat())
        };
        let list = show(&[]);
        let lines: Vec<&str> = list.lines().map(|line| &line[21..]).collect();
        assert_eq!(
            lines,
            ["read-write  /", "read-write  /home", "read-only   /monday  of /home", "read-only   /tuesday  of /home"]
        );
        let states = show(&["home/report"]);
        let lines: Vec<&str> = states.lines().map(|line| line[21..].trim_start()).collect();
        assert_eq!(lines, ["5 bytes  /home", "5 bytes  /monday", "12 bytes  /tuesday"]);
        assert_eq!(show(&["/home/report", "/tuesday"]), "second draft");
    }
}

/// Damages both copies of the tree blocks that hold the names of one directory.
fn damaged_tree_blocks_cost_what_lies_in_them(dir: &Path) {
    let image = dir.join("names.img");
    let filesystem = Filesystem::make_image(&image, 256 << 20).unwrap();
    filesystem.create_dir("/good").unwrap();
    for number in 0..300 {
        filesystem.write(format!("/good/file-{number}"), "text").unwrap();
    }
    filesystem.create_subvolume("/lost").unwrap();
    filesystem.write("/lost/a name that is not in another block", "text").unwrap();
    filesystem.close().unwrap();
    let mut bytes = fs::read(&image).unwrap();
    let name = b"a name that is not in another block";
    let places: Vec<usize> =
        bytes.windows(name.len()).enumerate().filter(|(_, at)| at == name).map(|(at, _)| at).collect();
    assert!(places.len() >= 2);
    places.into_iter().for_each(|at| bytes[at] = b'A');
    fs::write(&image, bytes).unwrap();
    let made = compile(&example("rescue.c"), dir, Compiler::Sanitized).unwrap();
    let folder = dir.join("names");
    let output = execute(&made, &[image.as_os_str(), folder.as_os_str()], 300);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "300 files, 1 damaged\n", "{errors}");
    assert!(errors.starts_with("rescue: //lost: cannot list '//lost': "), "{errors}");
    assert_eq!(fs::read_dir(folder.join("good")).unwrap().count(), 300);
}
