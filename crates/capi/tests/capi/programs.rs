//! Programs in C that test the interface.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use ubtrfs_testkit::exported_functions;

use crate::header::{crate_dir, functions_of_sources, structs};
use crate::library::{Compiler, compile, execute, library, output_of};

pub(crate) fn program(name: &str) -> std::path::PathBuf {
    crate_dir().join("tests/capi/programs").join(name)
}

/// The version of the symbols.
const VERSION: &str = "LIBUBTRFS_0";

#[test]
fn the_library_exports_the_functions_of_the_header() {
    let names = functions_of_sources();
    let mut map = format!("{VERSION} {{\nglobal:\n");
    names.iter().for_each(|name| writeln!(map, "    {name};").unwrap());
    map.push_str("local:\n    *;\n};\n");
    let path = crate_dir().join("versions.map");
    if std::env::var_os("UBTRFS_WRITE_HEADER").is_some() {
        fs::write(&path, &map).unwrap();
    }
    assert_eq!(fs::read_to_string(path).unwrap_or_default(), map, "run the test with UBTRFS_WRITE_HEADER=1");
    let versioned: Vec<String> = names.iter().map(|name| format!("{name}@@{VERSION}")).collect();
    assert_eq!(exported_functions(&library().join("libubtrfs.so.0")).unwrap(), versioned);
}

/// Functions of the library that these programs do not call.
fn not_called(programs: &[&str]) -> Vec<String> {
    let texts = programs.iter().map(|name| fs::read_to_string(program(name)).unwrap());
    let text = texts.collect::<Vec<_>>().concat();
    let is_missing = |name: &String| ["(", ","].iter().all(|end| !text.contains(&format!("{name}{end}")));
    functions_of_sources().into_iter().filter(is_missing).collect()
}

/// A new function needs a call in one of the programs, and in the bed.
#[test]
fn every_function_works_from_c() {
    assert_eq!(not_called(&["calls.c", "manage.c"]), [""; 0], "calls.c and manage.c do not call all functions");
    assert_eq!(not_called(&["bed.c", "bed_manage.h"]), ["ubtrfs_version"], "the bed does not call all functions");
    let dir = TempDir::with_prefix("ubtrfs-capi-calls-").unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        if let Some(made) = compile(&program("calls.c"), dir.path(), compiler) {
            let folder = dir.path().join(format!("{compiler:?}"));
            fs::create_dir(&folder).unwrap();
            assert_eq!(output_of(&made, &[folder.as_os_str()]), "done\n");
        }
    }
}

#[test]
fn calls_at_a_wrong_time_fail_and_lose_nothing() {
    let dir = TempDir::with_prefix("ubtrfs-capi-misuse-").unwrap();
    for compiler in [Compiler::Sanitized, Compiler::Clang, Compiler::Cpp] {
        if let Some(made) = compile(&program("misuse.c"), dir.path(), compiler) {
            assert_eq!(output_of(&made, &[]), "done\n");
        }
    }
}

/// Compares sizes and offsets in C with those in Rust.
macro_rules! layouts {
    ($($section:ident::$name:ident { $($field:ident),* })*) => {
        vec![$((
            size_of::<ubtrfs_capi::exports::$section::$name>(),
            vec![$((stringify!($field), std::mem::offset_of!(ubtrfs_capi::exports::$section::$name, $field))),*],
        )),*]
    };
}

/// Sizes of the structs, and offsets of their fields, in the order of the header.
fn layouts_in_rust() -> Vec<(usize, Vec<(&'static str, usize)>)> {
    layouts! {
        device::UbtrfsDeviceOptions {
            struct_size, size_bytes, flags, reserved, name, user, read_at, write_at, flush, discard, release
        }
        filesystem::UbtrfsOpenOptions {
            struct_size, flags, nr_devices, mount_options, subvolume, devices, memory_bytes
        }
        filesystem::UbtrfsMkfsOptions {
            struct_size, flags, nodesize, sectorsize, root_uid, root_gid, nanoseconds, seconds, label, uuid, csum,
            data_profile, metadata_profile
        }
        filesystem::UbtrfsSpaceUsage { total_bytes, free_bytes, available_bytes }
        attributes::UbtrfsTime { seconds, nanoseconds, is_set }
        attributes::UbtrfsMetadata {
            ino, subvolume_id, size, blocks, mode, kind, nlink, uid, gid, device_major, device_minor, reserved, accessed,
            modified, changed, created, more
        }
        attributes::UbtrfsTimes { struct_size, accessed, modified, created }
        directory::UbtrfsDirEntry { name, name_len, kind, is_subvolume }
        subvolume::UbtrfsSubvolume {
            path, id, parent_id, generation, created, uuid, parent_uuid, received_uuid, is_read_only, reserved, more
        }
        job::UbtrfsProgress { done, total, is_cancelled, is_paused }
        stream::UbtrfsSendOptions { struct_size, flags, version, parent, clone_sources, nr_clone_sources }
        stream::UbtrfsReceiveReport { nr_subvolumes, nr_commands, nr_errors, nr_bytes, more }
        balance::UbtrfsBalanceFilter {
            struct_size, flags, limit, usage_min, usage_max, devid, range_start, range_end, profiles, nr_profiles, convert
        }
        balance::UbtrfsBalanceOptions { struct_size, flags, reserved, data, metadata, system }
        balance::UbtrfsBalanceCounts { expected, considered, completed, failed, without_space, more }
        balance::UbtrfsExtentUser { subvolume_id, ino, path }
        balance::UbtrfsBalanceFailure { bytenr, reason, users, nr_users }
        balance::UbtrfsBalanceReport { counts, failures, nr_failures, more }
        balance::UbtrfsBalanceState { state, is_cancelling, is_pausing, reserved, counts }
        scrub::UbtrfsScrubOptions { struct_size, flags, nr_devids, devids, bytes_per_sec }
        scrub::UbtrfsScrubCounts {
            data_extents, tree_blocks, data_bytes, tree_bytes, read_errors, csum_errors, verify_errors, nr_without_csum,
            super_errors, uncorrectable_errors, corrected_errors, last_physical, more
        }
        scrub::UbtrfsScrubbedDevice { devid, counts, message, status, reserved }
        scrub::UbtrfsDamagedFile { subvolume_id, ino, path, repaired_bytes, lost_bytes }
        scrub::UbtrfsScrubReport { devices, nr_devices, files, nr_files, repaired_block_bytes, lost_block_bytes, more }
        members::UbtrfsReplaceReport { counts, files, nr_files, lost_block_bytes, more }
        space::UbtrfsGroupUsage { kind, profile, flags, total_bytes, used_bytes }
        space::UbtrfsDeviceShare { kind, profile, flags, nr_stripes, bytes }
        space::UbtrfsDeviceUsage {
            devid, uuid, path, state, is_seed, generation, total_bytes, slack_bytes, allocated_bytes, shares, nr_shares,
            more
        }
        space::UbtrfsSpaceReport {
            groups, nr_groups, devices, nr_devices, reserve_bytes, reserve_used_bytes, more
        }
        quota::UbtrfsQuotaState { kind, is_consistent, is_counting, reserved, counted_up_to, more }
        quota::UbtrfsQgroup {
            id, referenced, exclusive, max_referenced, max_exclusive, parents, nr_parents, members, nr_members, more
        }
        extents::UbtrfsDefragmentOptions { struct_size, flags, reserved, start, end, small_bytes, compress }
        check::UbtrfsProblem { code, text, tree, bytenr, is_error, reserved }
        check::UbtrfsCheckReport {
            is_clean, is_complete, nr_errors, nr_warnings, nr_trees, nr_tree_blocks, nr_data_extents, nr_inodes,
            data_bytes_verified
        }
        archive::UbtrfsImportOptions {
            struct_size, flags, strip_components, uid, gid, exclude, nr_exclude, tell, tell_user
        }
        archive::UbtrfsExportOptions { struct_size, flags, reserved, tell, tell_user }
        archive::UbtrfsArchiveReport { nr_members, nr_files, nr_bytes, nr_failed, more }
    }
}

#[test]
fn structs_have_one_layout_in_both_languages() {
    let (in_c, in_rust) = (structs(), layouts_in_rust());
    assert_eq!(in_c.len(), in_rust.len());
    let mut source = "#include <stdio.h>\n#include <ubtrfs.h>\nint main(void) {\n".to_owned();
    let mut expected = String::new();
    for ((name, fields), (size, offsets)) in in_c.iter().zip(&in_rust) {
        writeln!(source, "  printf(\"{name} %zu\\n\", sizeof({name}));").unwrap();
        writeln!(expected, "{name} {size}").unwrap();
        assert_eq!(fields.len(), offsets.len(), "{name}");
        for (field, (rust, offset)) in fields.iter().zip(offsets) {
            assert_eq!(field, rust, "{name}");
            writeln!(source, "  printf(\"{name}.{field} %zu\\n\", offsetof({name}, {field}));").unwrap();
            writeln!(expected, "{name}.{field} {offset}").unwrap();
        }
    }
    source.push_str("  return 0;\n}\n");
    let dir = TempDir::with_prefix("ubtrfs-capi-layout-").unwrap();
    fs::write(dir.path().join("layout.c"), source).unwrap();
    let made = compile(&dir.path().join("layout.c"), dir.path(), Compiler::Gcc).unwrap();
    assert_eq!(output_of(&made, &[]), expected);
}

/// `UBTRFS_BED_CALLS` sets the number of calls, and `UBTRFS_SEED` repeats a run.
#[test]
fn random_calls_with_wrong_arguments_end_in_errors() {
    let set = |name: &str| std::env::var(name).ok();
    let calls = set("UBTRFS_BED_CALLS").unwrap_or_else(|| "20000".to_owned());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = set("UBTRFS_SEED").unwrap_or_else(|| (now.as_nanos() % 1_000_000_000).to_string());
    println!("repeat with UBTRFS_BED_CALLS={calls} UBTRFS_SEED={seed}");
    let dir = TempDir::with_prefix("ubtrfs-capi-bed-").unwrap();
    let made = compile(&program("bed.c"), dir.path(), Compiler::Sanitized).unwrap();
    let words: Vec<OsString> = vec![dir.path().into(), calls.into(), seed.into()];
    let args: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
    let output = execute(&made, &args, 6 * 3600);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    assert!(output.status.success(), "{}: {err}", output.status);
    assert!(!err.contains("panicked"), "{err}");
}

#[test]
fn threads_share_handles() {
    let dir = TempDir::with_prefix("ubtrfs-capi-threads-").unwrap();
    let made = compile(&program("threads.c"), dir.path(), Compiler::Sanitized).unwrap();
    assert_eq!(output_of(&made, &[]), "done\n");
}
