//! Modules, kernels, captures and graphs.
//!
//! A module is PTX text, of which only the names of its entries count. A kernel named [`BUSY`] takes the ns of its
//! first parameter, a u64; any other takes `STANDIN_CUDA_KERNEL_NS`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::context::{owner, stream};
use crate::device::config;
use crate::error::{INVALID_HANDLE, INVALID_IMAGE, NOT_FOUND, Result};
use crate::export::exports;
use crate::handle::Table;
use crate::pointer::{Handle, In, KernelParameters, Out, Text};
use crate::timeline::Operation;

/// Kernel that keeps the device busy for as long as its parameter says.
const BUSY: &str = "standin_busy";

static MODULES: Table<Module> = Table::new(0x5e04);
static FUNCTIONS: Table<Function> = Table::new(0x5e05);
static GRAPHS: Table<Vec<Operation>> = Table::new(0x5e06);
static EXECUTABLE_GRAPHS: Table<Vec<Operation>> = Table::new(0x5e07);

struct Module {
    entries: Vec<String>,
}

struct Function {
    busy: bool,
}

impl Module {
    fn from_ptx(text: &str) -> Result<Self> {
        let words: Vec<&str> = text.split([' ', '\t', '\r', '\n', '(', ')', '{', '}']).collect();
        let entries: Vec<String> =
            words.windows(2).filter(|pair| pair[0] == ".entry").map(|pair| pair[1].to_owned()).collect();
        if entries.is_empty() { Err(INVALID_IMAGE) } else { Ok(Self { entries }) }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const c_void,
    attribute_count: c_uint,
}

fn launch(function: Handle, handle: Handle, parameters: KernelParameters) -> Result {
    let function = FUNCTIONS.get(function)?;
    let ns = if function.busy { parameters.get()?.get()? } else { config().kernel_ns };
    stream(handle)?.submit(&[Operation::Kernel { ns }])
}

fn launch_graph(graph: Handle, handle: Handle) -> Result {
    let graph = EXECUTABLE_GRAPHS.get(graph)?;
    stream(handle)?.submit(&graph)
}

exports! {
    fn cuModuleLoadData(module: Out<Handle>, image: Text) {
        owner()?;
        let loaded = Module::from_ptx(&image.get()?)?;
        module.set(MODULES.insert(|_| loaded))
    }
    fn cuModuleUnload(module: Handle) {
        MODULES.remove(module)?;
        Ok(())
    }
    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) {
        let (module, name) = (MODULES.get(module)?, name.get()?);
        if !module.entries.contains(&name) {
            return Err(NOT_FOUND);
        }
        function.set(FUNCTIONS.insert(|_| Function { busy: name == BUSY }))
    }
    #[expect(clippy::too_many_arguments, reason = "as the driver API has them")]
    fn cuLaunchKernel(function: Handle, _grid_x: c_uint, _grid_y: c_uint, _grid_z: c_uint, _block_x: c_uint,
                      _block_y: c_uint, _block_z: c_uint, _shared_bytes: c_uint, stream: Handle,
                      parameters: KernelParameters, _extra: *mut c_void) {
        launch(function, stream, parameters)
    }
    #[expect(clippy::too_many_arguments, reason = "as the driver API has them")]
    fn cuLaunchKernel_ptsz(function: Handle, _grid_x: c_uint, _grid_y: c_uint, _grid_z: c_uint, _block_x: c_uint,
                           _block_y: c_uint, _block_z: c_uint, _shared_bytes: c_uint, stream: Handle,
                           parameters: KernelParameters, _extra: *mut c_void) {
        launch(function, stream, parameters)
    }
    fn cuLaunchKernelEx(config: In<LaunchConfig>, function: Handle, parameters: KernelParameters,
                        _extra: *mut c_void) {
        launch(function, config.get()?.stream, parameters)
    }
    fn cuLaunchKernelEx_ptsz(config: In<LaunchConfig>, function: Handle, parameters: KernelParameters,
                             _extra: *mut c_void) {
        launch(function, config.get()?.stream, parameters)
    }
    fn cuStreamBeginCapture_v2(handle: Handle, _mode: c_int) {
        stream(handle)?.begin_capture()
    }
    fn cuStreamEndCapture(handle: Handle, graph: Out<Handle>) {
        let operations = stream(handle)?.end_capture();
        let handle = operations.as_ref().map_or(std::ptr::null_mut(), |ops| GRAPHS.insert(|_| ops.clone()));
        graph.set(handle)?;
        operations.map(|_| ())
    }
    fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, _flags: u64) {
        let graph = GRAPHS.get(graph)?;
        executable.set(EXECUTABLE_GRAPHS.insert(|_| Vec::clone(&graph)))
    }
    fn cuGraphInstantiate_v2(executable: Out<Handle>, graph: Handle, _node: Out<Handle>, _log: Out<c_char>,
                             _log_bytes: usize) {
        let graph = GRAPHS.get(graph)?;
        executable.set(EXECUTABLE_GRAPHS.insert(|_| Vec::clone(&graph)))
    }
    fn cuGraphLaunch(graph: Handle, stream: Handle) {
        launch_graph(graph, stream)
    }
    fn cuGraphLaunch_ptsz(graph: Handle, stream: Handle) {
        launch_graph(graph, stream)
    }
    fn cuGraphExecDestroy(graph: Handle) {
        EXECUTABLE_GRAPHS.remove(graph).map(|_| ()).map_err(|_| INVALID_HANDLE)
    }
    fn cuGraphDestroy(graph: Handle) {
        GRAPHS.remove(graph).map(|_| ()).map_err(|_| INVALID_HANDLE)
    }
}
