//! Gives the shared library the soname of the original.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libbtrfsutil.so.1");
}
