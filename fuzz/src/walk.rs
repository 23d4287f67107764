//! Fuzz target: commands that walk trees of files, on images with wrong content and valid checksums: `ls`, `stat`,
//! `cp` to the host and inside the image, `export`, `rm`.

use std::cell::RefCell;
use std::fs;
use std::sync::Arc;

use ubtrfs_device::{Access, FileDevice};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_testkit::hostile::SeedImage;

use crate::{Scratch, run, words};

/// Runs one input: the first byte chooses the image, the rest is a program for `SeedImage::mutated`.
pub fn walk(data: &[u8]) {
    thread_local! {
        static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
    }
    let Some((&first, program)) = data.split_first() else { return };
    let seed = SeedImage::get(usize::from(first) % SeedImage::COUNT);
    let medium = seed.mutated(program, &SeedImage::chosen_by(first));
    SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(|| Scratch::new("walk"));
        medium.save(&scratch.image()).expect("the image is written");
        commands(scratch);
        scratch.check("a walk");
        scratch.clear();
    });
}

fn commands(scratch: &Scratch) {
    let at = |path: &[u8]| scratch.at(path);
    run(&words!["ls", "-lR", "--memory", MEMORY, at(b"/")]);
    run(&words!["cp", "-r", "--memory", MEMORY, at(b"/."), scratch.target()]);
    // Copy again over the existing files. `/.` means the content of the root instead of the root itself.
    run(&words!["cp", "-a", "--memory", MEMORY, at(b"/."), scratch.target()]);
    let _ = fs::remove_file(scratch.archive());
    run(&words!["export", "-S", "-f", scratch.archive(), at(b"/")]);
    no_member_leads_out(&fs::read(scratch.archive()).unwrap_or_default());
    let names = top_names(scratch).unwrap_or_default();
    let paths = || names.iter().map(|name| at(&[b"/", &name[..]].concat()));
    let on_all = |command: &[&str]| {
        let mut args: Vec<_> = command.iter().map(std::ffi::OsString::from).collect();
        args.extend(paths());
        run(&args)
    };
    if names.is_empty() {
        return;
    }
    on_all(&["stat", "--memory", MEMORY]);
    for path in paths().take(4) {
        run(&words!["cp", "-r", "--memory", MEMORY, path, at(b"/copied")]);
    }
    on_all(&["rm", "-r", "--memory", MEMORY]);
}

/// Returns the readable names in the root directory.
fn top_names(scratch: &Scratch) -> Option<Vec<Vec<u8>>> {
    let device = FileDevice::open(&scratch.image(), Access::ReadOnly).ok()?;
    let mut options = MountOptions::parse("ro").ok()?;
    options.memory_bytes = 64 << 20;
    let fs = Fs::open(vec![Arc::new(device)], options).ok()?;
    let mut names = Vec::new();
    let listed = fs.readdir(fs.root(), 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push(entry.name.to_vec());
        }
        names.len() < 50
    });
    let closed = fs.close();
    listed.and(closed).ok().map(|()| names)
}

/// Fails if a name in the headers of a written archive leads out of its directory.
fn no_member_leads_out(archive: &[u8]) {
    for header in archive.chunks_exact(512).filter(|block| block.get(257..262) == Some(b"ustar")) {
        let name: Vec<u8> = header[..100].iter().copied().take_while(|byte| *byte != 0).collect();
        let leads_out = name.starts_with(b"/") || name.split(|byte| *byte == b'/').any(|part| part == b"..");
        assert!(!leads_out, "a member is named {}", String::from_utf8_lossy(&name));
    }
}

const MEMORY: &str = "64M";
