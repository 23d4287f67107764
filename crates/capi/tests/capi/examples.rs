//! The examples, and the images that they make.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use ubtrfs_testkit::{Compare, LoopMount, btrfs_check, capability, compare_trees};

use crate::header::crate_dir;
use crate::library::{Compiler, compile, output_of};

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
