import sys, os, time, shutil, cProfile, pstats, statistics as st, logging
import torch, laststep
from laststep.engine.copy import fingerprint
dev="cuda"; torch.manual_seed(0)
def state(n_layers=40,d=1536,device=dev):
    ps=[]
    g=torch.Generator(device=device).manual_seed(1)
    for i in range(n_layers):
        for shp in ((3*d,d),(d,d),(4*d,d),(d,4*d),(d,),(d,),(3*d,),(4*d,)):
            ps.append(torch.nn.Parameter(torch.randn(shp,device=device,dtype=torch.bfloat16,generator=g)))
    ps.append(torch.nn.Parameter(torch.randn(50304,d,device=device,dtype=torch.bfloat16,generator=g)))
    m=torch.nn.Module()
    for i,p in enumerate(ps): m.register_parameter(f"p{i}",p)
    m.register_buffer("run", torch.zeros(1024,device=device))
    return m
m=state(); opt=torch.optim.AdamW(m.parameters(),lr=1e-3,foreach=True)
A=torch.randn(8192,8192,device=dev,dtype=torch.bfloat16)
for p in m.parameters(): p.grad=torch.randn_like(p)*1e-3
def iteration(n):
    global A
    B=A
    for _ in range(n): B=B@A*0.01
    m.run.add_(1)
    opt.step()
N=80
def timed(k,n=N,save_at=(),ck=None,base=0):
    ts=[];hs=[]
    stream=torch.cuda.current_stream()
    for i in range(k):
        t=time.perf_counter(); iteration(n)
        if i in save_at: 
            t1=time.perf_counter(); hs.append(ck.save(base+i)); print("   python in save %.2f ms"%((time.perf_counter()-t1)*1e3))
        stream.synchronize(); ts.append(time.perf_counter()-t)
    return ts,hs
iteration(N); timed(5)
nb=sum(p.nbytes for p in m.parameters()); tot=nb*3
print("state GB", tot/1e9, "tensors", len(list(m.parameters()))*3)
base=timed(10)[0]; print("base iter ms", st.median(base)*1e3, max(base)*1e3)
# fingerprint
ts=[p.detach() for p in m.parameters()]+[s[k] for s in opt.state.values() for k in("exp_avg","exp_avg_sq")]
t=time.perf_counter(); from laststep.engine.copy.kernel_check import check_kernels; check_kernels("cuda:0"); f=fingerprint.Fingerprint(ts,torch.cuda.Stream()); torch.cuda.synchronize(); print("fingerprint first s", time.perf_counter()-t, "triton", f._tiles is not None)
for _ in range(3):
    torch.cuda.synchronize(); t=time.perf_counter(); r=f.rows(ts); torch.cuda.synchronize(); print("fingerprint ms",(time.perf_counter()-t)*1e3)
t=time.perf_counter(); f=fingerprint.Fingerprint(ts,torch.cuda.Stream()); print("table build ms",(time.perf_counter()-t)*1e3)
with torch.no_grad(): ts[3].view(-1)[5]*=-1
r2=f.rows(ts); print("sign flip seen", (r!=r2).any().item())
logging.basicConfig(level=logging.INFO)
D="/tmp/gpurun"
# raw write
def raw(gb=4,threads=8,req=16<<20):
    import mmap,threading
    buf=mmap.mmap(-1,req); buf.write(os.urandom(req)); fd=os.open("/tmp/raw",os.O_CREAT|os.O_WRONLY|os.O_DIRECT); n=int(gb*1e9)//req
    t=time.perf_counter()
    def w(k):
        for i in range(k,n,threads): os.pwrite(fd,buf,i*req)
    th=[threading.Thread(target=w,args=(k,)) for k in range(threads)]; [x.start() for x in th]; [x.join() for x in th]; os.fsync(fd); dt=time.perf_counter()-t; os.close(fd); os.unlink("/tmp/raw"); return n*req/dt/1e9
print("raw write GB/s", [round(raw(threads=t),2) for t in (1,4,8)])
for mode in ("device","lazy","auto"):
    shutil.rmtree(D,ignore_errors=True); print("=====",mode)
    t=time.perf_counter(); ck=laststep.Checkpointer(D,model=m,optimizer=opt,capture=mode); print("construct s",time.perf_counter()-t)
    b=timed(25)[0]; print("iters during registration: median %.1f max %.1f"%(st.median(b)*1e3,max(b)*1e3))
    ck._pool.wait_ready()
    for rep in range(3):
        base=st.median(timed(5)[0])
        ts,hs=timed(8,save_at=(1,),ck=ck,base=rep*100)
        print("  iter-extra ms:", [round((x-base)*1e3,1) for x in ts])
        hs[0].wait(); r=hs[0].report; print("  ",r, "GB/s durable", r.size_bytes/r.durable_s/1e9)
    if mode=="device":
        pr=cProfile.Profile(); pr.enable(); h=ck.save(999); pr.disable(); h.wait(); pstats.Stats(pr).sort_stats("cumtime").print_stats(18)
    # correctness
    torch.cuda.synchronize(); ref=[t.clone() for t in ts_ ] if False else [p.detach().clone() for p in m.parameters()]+[s[k].clone() for s in opt.state.values() for k in("exp_avg","exp_avg_sq")]
    h=ck.save(5000); iteration(N); iteration(N); h.wait()
    m2=state(); 
    for p in m2.parameters(): p.data.zero_()
    o2=torch.optim.AdamW(m2.parameters(),foreach=True)
    ck2=laststep.Checkpointer(D,model=m2,optimizer=o2); ck2._pool.wait_ready()
    os.system("sync; echo 3 > /proc/sys/vm/drop_caches")
    t=time.perf_counter(); rr=ck2.restore(); torch.cuda.synchronize(); dt=time.perf_counter()-t
    got=[p.detach() for p in m2.parameters()]+[s[k] for s in o2.state.values() for k in("exp_avg","exp_avg_sq")]
    print("restore", rr.step, "equal", all(torch.equal(a,b) for a,b in zip(ref,got)), len(ref)==len(got), "GB/s", tot/dt/1e9)
    ck2.close(); del m2,o2,ck2,got,ref
    ck.close()
    torch.cuda.empty_cache()
