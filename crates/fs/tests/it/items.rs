//! Linux and this engine run the same operations on two images, and the items of the subvolume must be equal.
//!
//! Method: a list of operations on names and attributes runs on a loop mount and in-process. Then `btrfs
//! inspect-internal dump-tree` of both images is compared, except for expected differences (addresses, transactions,
//! times, change counters).

use anyhow::Result;
use ubtrfs_testkit::{FsTarget, Image, LoopMount, NodeKind, PathTarget, RenameOp, Target, capability, run};

fn operations(on: &mut dyn Target) -> Result<(), i32> {
    let dir = NodeKind::Directory;
    let file = NodeKind::File;
    on.create(b"a", dir, 0o755, (0, 0))?;
    on.create(b"b", dir, 0o700, (0, 0))?;
    for i in 0..20 {
        on.create(format!("a/file {i}").as_bytes(), file, 0o640, (0, 0))?;
    }
    on.symlink(b"a/symlink", b"file 3")?;
    on.create(b"b/fifo", NodeKind::Fifo, 0o600, (0, 0))?;
    on.create(b"b/socket", NodeKind::Socket, 0o600, (0, 0))?;
    on.create(b"b/char", NodeKind::CharDevice, 0o666, (5, 300))?;
    on.create(b"b/block", NodeKind::BlockDevice, 0o660, (259, 70_000))?;
    for i in 0..10 {
        on.link(b"a/file 7", format!("b/link {i}").as_bytes())?;
        on.link(b"a/file 7", format!("a/link {i}").as_bytes())?;
    }
    for i in 0..5 {
        on.unlink(format!("b/link {}", i * 2).as_bytes())?;
        on.unlink(format!("a/file {}", i * 2 + 10).as_bytes())?;
    }
    on.rename(b"a/file 1", b"a/renamed", RenameOp::Replace)?;
    on.rename(b"a/file 2", b"b/moved", RenameOp::Replace)?;
    on.rename(b"a/file 3", b"a/file 4", RenameOp::Replace)?;
    on.rename(b"a/file 5", b"b/moved", RenameOp::Exchange)?;
    on.rename(b"b", b"a/b", RenameOp::NoReplace)?;
    on.create(b"empty", dir, 0o755, (0, 0))?;
    on.create(b"empty2", dir, 0o755, (0, 0))?;
    on.rename(b"empty", b"empty2", RenameOp::Replace)?;
    on.rmdir(b"empty2")?;
    on.chmod(b"a/file 6", 0o4711)?;
    on.chown(b"a/file 6", 1000, 1001)?;
    on.set_mtime(b"a/file 6", (1_000_000_000, 123_456_789))?;
    on.set_xattr(b"a/file 6", b"user.one", b"1")?;
    on.set_xattr(b"a/file 6", b"user.two", &[2; 100])?;
    on.set_xattr(b"a/file 6", b"user.one", b"changed")?;
    on.set_xattr(b"a", b"trusted.t", b"")?;
    on.remove_xattr(b"a/file 6", b"user.two")?;
    // An ACL that also gives a named user read, write and execute permission.
    let acl = [
        &[2u8, 0, 0, 0][..],
        &[1, 0, 7, 0, 255, 255, 255, 255],
        &[2, 0, 7, 0, 232, 3, 0, 0],
        &[4, 0, 5, 0, 255, 255, 255, 255],
        &[16, 0, 7, 0, 255, 255, 255, 255],
        &[32, 0, 0, 0, 255, 255, 255, 255],
    ]
    .concat();
    on.create(b"acl", dir, 0o2755, (0, 0))?;
    on.chmod(b"acl", 0o2755)?;
    on.set_xattr(b"acl", b"system.posix_acl_default", &acl)?;
    on.set_xattr(b"acl", b"system.posix_acl_access", &acl)?;
    on.chmod(b"acl", 0o2700)?;
    on.create(b"acl/dir", dir, 0o755, (0, 0))?;
    on.create(b"acl/file", file, 0o644, (0, 0))?;
    on.create(b"prop", dir, 0o755, (0, 0))?;
    on.set_xattr(b"prop", b"btrfs.compression", b"zstd")?;
    on.create(b"prop/file", file, 0o644, (0, 0))?;
    on.create(b"prop/dir", dir, 0o755, (0, 0))?;
    on.set_xattr(b"prop/dir", b"btrfs.compression", b"none")?;
    on.create(b"prop/dir/file", file, 0o644, (0, 0))?;
    on.symlink(b"prop/symlink", b"x")?;
    on.create(&[b"long/", &[b'n'; 250][..]].concat()[5..], file, 0o644, (0, 0))?;
    on.sync()
}

/// The items of the top-level subvolume, without expected differences.
fn items(image: &Image) -> Result<Vec<String>> {
    let path = image.path().display().to_string();
    let text = run("btrfs", ["inspect-internal", "dump-tree", "-t", "5", &path])?;
    let mut items: Vec<String> = Vec::new();
    for line in text.lines().skip_while(|line| !line.trim_start().starts_with("item ")) {
        let line = line.trim();
        let starts_item = line.strip_prefix("item ").and_then(|rest| rest.split_once(" key "));
        if let Some((_, key)) = starts_item {
            let (key, rest) = key.split_once(" itemoff ").unwrap_or((key, ""));
            items.push(format!("{key} size {}", rest.split(' ').next_back().unwrap_or_default()));
            continue;
        }
        let differs = [
            "leaf ",
            "node ",
            "fs uuid",
            "chunk uuid",
            "atime ",
            "ctime ",
            "otime ",
            "checksum ",
            "total bytes",
            "bytes used",
            "uuid ",
            "key ",
        ];
        if differs.iter().any(|start| line.starts_with(start)) {
            continue;
        }
        // Keep the time that the operations set; all other times differ.
        if line.starts_with("mtime ") && !line.contains("1000000000") {
            continue;
        }
        let mut words = Vec::new();
        let mut skip = false;
        for word in line.split(' ') {
            if std::mem::take(&mut skip) {
                continue;
            }
            match word {
                "generation" | "transid" | "sequence" => skip = true,
                _ => words.push(word),
            }
        }
        if let Some(last) = items.last_mut() {
            last.push_str(" | ");
            last.push_str(&words.join(" "));
        }
    }
    Ok(items)
}

fn compare(mkfs: &[&str]) -> Result<()> {
    let (theirs, ours) = (Image::kernel_made(256 << 20, mkfs)?, Image::kernel_made(256 << 20, mkfs)?);
    let mount = LoopMount::new(theirs.path(), "noatime")?;
    operations(&mut PathTarget::new(mount.path())).map_err(|errno| anyhow::anyhow!("Linux: errno {errno}"))?;
    mount.close()?;
    let mut target = FsTarget::open(ours.path(), "noatime")?;
    operations(&mut target).map_err(|errno| anyhow::anyhow!("ubtrfs: errno {errno}"))?;
    target.close()?;
    let (theirs, ours) = (items(&theirs)?, items(&ours)?);
    assert!(ours.len() > 150, "{} items", ours.len());
    for (theirs, ours) in theirs.iter().zip(&ours) {
        assert_eq!(theirs, ours, "Linux's item first");
    }
    assert_eq!(theirs.len(), ours.len());
    Ok(())
}

#[test]
fn items_are_those_that_linux_makes() {
    if capability::kernel_oracle() {
        compare(&[]).unwrap();
    }
}

#[test]
fn items_in_small_nodes_are_those_that_linux_makes() {
    if capability::kernel_oracle() {
        compare(&["-n", "4096"]).unwrap();
    }
}
