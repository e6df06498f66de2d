//! What is staged is what a tracer expects to find, and works.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;

use engines::{Placement, Profiles};
use standin::{Nvinfer, stage};

/// Names of the probe points that are found in a staged file, and of those that are refused.
fn points(path: &Path) -> (Vec<String>, Vec<String>) {
    let data = std::fs::read(path).unwrap();
    let library = Profiles::builtin().inspect(path, &data).unwrap();
    assert!(library.simulated, "{path:?}");
    (
        library.points.into_iter().map(|point| point.name).collect(),
        library.refusals.into_iter().map(|refusal| refusal.point).collect(),
    )
}

#[test]
fn resolver_finds_what_it_should() {
    let dir = tempfile::tempdir().unwrap();
    for variant in Nvinfer::ALL {
        let path = variant.stage(dir.path()).unwrap();
        let (found, refused) = points(&path);
        let name = "enqueueV3".to_owned();
        match variant {
            Nvinfer::Trt8 | Nvinfer::Trt10 | Nvinfer::Trt11 => {
                assert!(
                    found.contains(&name) && !refused.contains(&name),
                    "{variant:?}: {found:?} {refused:?}"
                );
            }
            Nvinfer::NoRtti | Nvinfer::TwoImplementations => {
                assert!(
                    !found.contains(&name) && refused.contains(&name),
                    "{variant:?}: {found:?} {refused:?}"
                );
            }
        }
    }
}

/// The slots are those of the real library's headers.
#[test]
fn tensors_are_asked_for_by_the_slots_of_each_version() {
    let dir = tempfile::tempdir().unwrap();
    let mut profiles = Profiles::builtin();
    profiles.load(Path::new("shapes")).unwrap();
    for variant in [Nvinfer::Trt8, Nvinfer::Trt10, Nvinfer::Trt11] {
        let path = variant.stage(dir.path()).unwrap();
        let library = profiles.inspect(&path, &std::fs::read(&path).unwrap()).unwrap();
        for name in ["setInputShape", "getTensorShape", "getTensorDataType", "createExecutionContext"] {
            let point = library.points.iter().find(|point| point.name == name);
            let point = point.unwrap_or_else(|| panic!("{variant:?}: no {name}: {:?}", library.refusals));
            assert!(
                point.evidence.contains("is the version's slot"),
                "{variant:?} {name}: {}",
                point.evidence
            );
        }
    }
}

#[test]
fn driver_is_probed_cheaply() {
    let dir = tempfile::tempdir().unwrap();
    stage(dir.path()).unwrap();
    for link in ["libcuda.so", "libcuda.so.1"] {
        let path = dir.path().join(link).canonicalize().unwrap();
        assert!(path.file_name().unwrap().to_string_lossy().starts_with("libcuda.so.0."));
    }
    let path = dir.path().join("libcuda.so.1").canonicalize().unwrap();
    let library = Profiles::builtin().inspect(&path, &std::fs::read(&path).unwrap()).unwrap();
    assert!(
        library.refusals.iter().all(|refusal| !refusal.point.starts_with("cuStream")),
        "{:?}",
        library.refusals
    );
    for point in &library.points {
        assert_eq!(point.placement, Placement::Emulated, "{point:?}");
        assert_eq!(point.offset, point.function_offset + 10, "{point:?}");
    }
}

/// Not a test of its own: the program that the test below runs with the staged libraries.
#[test]
fn child() {
    if std::env::var_os("STANDIN_CHILD").is_none() {
        return;
    }
    let open = |name: &str| {
        let name = CString::new(name).unwrap();
        // SAFETY: the name is a string.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        library
    };
    let find = |library: *mut c_void, name: &str| {
        let name = CString::new(name).unwrap();
        // SAFETY: the library is loaded and the name is a string.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        assert!(!address.is_null());
        address
    };
    let (cuda, nvinfer) = (open("libcuda.so.1"), open("libnvinfer.so.10"));
    type One<A> = unsafe extern "C" fn(A) -> c_int;
    type Two<A, B> = unsafe extern "C" fn(A, B) -> c_int;
    type Pointer = *mut c_void;
    // SAFETY: the functions have these types.
    let (init, retain, set, query, synchronize, create, set_step, destroy) = unsafe {
        (
            std::mem::transmute::<Pointer, One<c_int>>(find(cuda, "cuInit")),
            std::mem::transmute::<Pointer, Two<*mut Pointer, c_int>>(find(cuda, "cuDevicePrimaryCtxRetain")),
            std::mem::transmute::<Pointer, One<Pointer>>(find(cuda, "cuCtxSetCurrent")),
            std::mem::transmute::<Pointer, One<Pointer>>(find(cuda, "cuStreamQuery")),
            std::mem::transmute::<Pointer, One<Pointer>>(find(cuda, "cuStreamSynchronize")),
            std::mem::transmute::<Pointer, unsafe extern "C" fn() -> Pointer>(find(
                nvinfer,
                "standin_create_context",
            )),
            std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer, u64, u32, u64)>(find(
                nvinfer,
                "standin_set_step",
            )),
            std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer)>(find(
                nvinfer,
                "standin_destroy_context",
            )),
        )
    };
    let mut context = null_mut();
    // SAFETY: arguments as the functions want them; the implementation is at offset 8 of the context and its 37th
    // virtual function is enqueueV3.
    unsafe {
        assert_eq!((init(0), retain(&raw mut context, 0), set(context)), (0, 0, 0));
        let engine = create();
        assert!(!engine.is_null());
        let implementation = *engine.cast::<Pointer>().add(1);
        let vtable = *implementation.cast::<*const Pointer>();
        let enqueue =
            std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer, Pointer) -> bool>(*vtable.add(37));
        // Long enough to be seen while it runs.
        set_step(engine, 200_000_000, 3, 1_000);
        assert!(enqueue(implementation, null_mut()));
        assert_eq!(query(null_mut()), 600);
        assert_eq!(synchronize(null_mut()), 0);
        assert_eq!(query(null_mut()), 0);
        destroy(engine);
    }
}

#[test]
fn engine_launches_on_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    stage(dir.path()).unwrap();
    let log = dir.path().join("truth.jsonl");
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child"])
        .env("LD_LIBRARY_PATH", dir.path())
        .env("STANDIN_CHILD", "1")
        .env("STANDIN_CUDA_LOG", &log)
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(std::fs::read_to_string(&log).unwrap().matches("\"kind\":\"kernel\"").count(), 3);
}
