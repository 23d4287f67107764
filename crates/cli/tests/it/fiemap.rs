//! Tests of `ubtrfs filesystem fiemap`. Method: Linux fills an image with files that share extents in several ways. For
//! each block of each file, the flag `shared` must equal that of `filefrag -v` on Linux.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, capability, run as sh};

use crate::common::{ok, text, ubtrfs};

const BLOCK: u64 = 4096;

/// The blocks of a file according to `filefrag -v -b4096`, and whether each is shared.
fn blocks_of_linux(path: &str) -> BTreeMap<u64, bool> {
    let shown = sh("filefrag", ["-v", "-b4096", path]).unwrap();
    let mut blocks = BTreeMap::new();
    // `   0:        0..      63:       3392..      3455:     64:             last,shared,eof`
    for line in shown.lines().filter(|line| line.contains("..")) {
        let fields: Vec<&str> = line.split(':').collect();
        let (first, last) = fields[1].split_once("..").unwrap();
        let flags = fields.last().unwrap();
        for block in first.trim().parse::<u64>().unwrap()..=last.trim().parse().unwrap() {
            blocks.insert(block, flags.contains("shared"));
        }
    }
    blocks
}

fn blocks_of_ubtrfs(path: &str) -> BTreeMap<u64, bool> {
    let extents: Value = serde_json::from_str(&ok(ubtrfs(["filesystem", "fiemap", "--json", path]))).unwrap();
    let mut blocks = BTreeMap::new();
    let mut is_any_shared = false;
    for extent in extents.as_array().unwrap() {
        let is_shared = extent["is_shared"].as_bool().unwrap();
        is_any_shared |= is_shared;
        let (offset, len) = (extent["offset"].as_u64().unwrap(), extent["len"].as_u64().unwrap());
        blocks.extend((offset / BLOCK..(offset + len).div_ceil(BLOCK)).map(|block| (block, is_shared)));
    }
    let shown = ok(ubtrfs(["filesystem", "fiemap", path]));
    assert_eq!(shown.contains("shared"), is_any_shared, "{shown}");
    blocks
}

#[test]
fn extents_are_shared_as_on_linux() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let script = "
        btrfs -q subvolume create a; cd a
        for f in plain cloned part twice snap over; do head -c 400000 /dev/urandom > $f; done
        cp --reflink=always cloned copy
        xfs_io -f -c 'reflink part 0 65536 65536' into >/dev/null 2>&1 || cp --reflink=always part into
        xfs_io -c 'reflink twice 0 409600 65536' twice >/dev/null 2>&1 || true
        touch packed; chattr +c packed; yes text | head -c 500000 > packed; cp --reflink=always packed packed2
        fallocate -l 200000 prealloc; echo x > inline
        sync; cd ..
        btrfs -q subvolume snapshot a s
        head -c 65536 /dev/urandom | dd of=a/over bs=64k seek=1 conv=notrunc status=none
        head -c 100000 /dev/urandom > a/alone
        sync; dd if=/dev/urandom of=a/alone bs=4k seek=3 count=2 conv=notrunc status=none; sync";
    sh("bash", ["-ec", &format!("cd {} && {script}", text(linux.path()))]).unwrap();
    let files = ["plain", "cloned", "copy", "part", "into", "twice", "snap", "over", "packed", "packed2", "prealloc"];
    let mut names: Vec<String> = ["a", "s"].iter().flat_map(|dir| files.map(|file| format!("{dir}/{file}"))).collect();
    names.push("a/alone".to_owned());
    let expected: Vec<_> = names.iter().map(|name| blocks_of_linux(&text(&linux.join(name)))).collect();
    linux.close().unwrap();
    let all: Vec<bool> = expected.iter().flat_map(|blocks| blocks.values().copied()).collect();
    assert!(all.contains(&true) && all.contains(&false));

    for (name, expected) in names.iter().zip(&expected) {
        assert_eq!(&blocks_of_ubtrfs(&format!("{}:/{name}", text(image.path()))), expected, "{name}");
    }
    let dir = TempDir::new().unwrap();
    ok(ubtrfs(["mount", &text(image.path()), &text(dir.path())]));
    for (name, expected) in names.iter().zip(&expected) {
        assert_eq!(&blocks_of_ubtrfs(&text(&dir.path().join(name))), expected, "{name}");
    }
    // A clone and a snapshot by ubtrfs are shared after the next commit; a new file is not.
    fs::write(dir.path().join("new"), vec![7; 300_000]).unwrap();
    let new = text(&dir.path().join("new"));
    assert!(blocks_of_ubtrfs(&new).values().all(|is_shared| !is_shared));
    ok(ubtrfs(["filesystem", "clone", &new, &text(&dir.path().join("clone"))]));
    ok(ubtrfs(["sync", &text(dir.path())]));
    assert!(blocks_of_ubtrfs(&new).values().all(|is_shared| *is_shared));
    fs::remove_file(dir.path().join("clone")).unwrap();
    ok(ubtrfs(["umount", &text(dir.path())]));
    assert!(blocks_of_ubtrfs(&format!("{}:/new", text(image.path()))).values().all(|is_shared| !is_shared));
}
