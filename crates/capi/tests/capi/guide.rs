//! The programs and fragments of the guide.
//!
//! A block of C with `main` is a program. All other blocks together are one, each in a function of its own.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::header::crate_dir;
use crate::library::{Compiler, compile, library};

/// The fragments use a filesystem, an error, and the functions of a device.
const PRELUDE: &str = r#"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ubtrfs.h>
static ubtrfs_fs *fs;
static ubtrfs_error *error;
static void check(int status) {
  if (status != 0) {
    fprintf(stderr, "%s\n", ubtrfs_error_message(error));
    exit(1);
  }
}
static int disk_read(void *user, void *data, size_t len, uint64_t offset) {
  memcpy(data, (char *)user + offset, len);
  return 0;
}
static int disk_write(void *user, const void *data, size_t len, uint64_t offset) {
  memcpy((char *)user + offset, data, len);
  return 0;
}
static int disk_flush(void *user) {
  (void)user;
  return 0;
}
"#;

#[test]
fn the_code_of_the_guide_works() {
    let text = fs::read_to_string(crate_dir().join("../../docs/guide/c.md")).unwrap();
    let blocks: Vec<&str> = text.split("```c\n").skip(1).map(|rest| rest.split_once("```").unwrap().0).collect();
    let (programs, fragments): (Vec<&str>, Vec<&str>) = blocks.iter().partition(|block| block.contains("int main"));
    assert!(programs.len() == 1 && fragments.len() >= 5);
    let mut all = format!("#define _POSIX_C_SOURCE 200809L\n{PRELUDE}");
    for (index, fragment) in fragments.iter().enumerate() {
        writeln!(all, "static void fragment_{index}(void) {{\n{fragment}}}").unwrap();
    }
    all.push_str("int main(void) {\n  check(ubtrfs_make_in_memory(256 << 20, &fs, &error));\n");
    (0..fragments.len()).for_each(|index| writeln!(all, "  fragment_{index}();").unwrap());
    // The device of the guide is not closed.
    all.push_str("  check(ubtrfs_close(fs, &error));\n  return 0;\n}\n");
    let dir = TempDir::with_prefix("ubtrfs-capi-guide-").unwrap();
    for (name, source) in [("program.c", programs[0]), ("fragments.c", &all)] {
        let path = dir.path().join(name);
        fs::write(&path, source).unwrap();
        let made = compile(&path, dir.path(), Compiler::Sanitized).unwrap();
        let output = Command::new(made).current_dir(dir.path()).env("LD_LIBRARY_PATH", library()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{name}: {output:?}");
        if name == "fragments.c" {
            let shown = String::from_utf8(output.stdout).unwrap();
            assert!(
                shown.starts_with("cannot open '/missing': no such file or directory\nopen, /missing\n"),
                "{shown}"
            );
        }
    }
    let image = ubtrfs::Filesystem::open_image(dir.path().join("disk.img")).unwrap();
    assert_eq!(image.read("/monday/hello.txt").unwrap(), b"hello");
}
